"""Settings of the jobs of a sweep, read from the overrides of their command lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Job(Protocol):
    """A finished job of a sweep."""

    @property
    def overrides(self) -> Sequence[str]:
        """Overrides of the command line, as ``name=value``."""


def differing_settings(jobs: Sequence[Job]) -> list[str]:
    """Returns the names of the settings that differ between the jobs."""
    settings = [_settings(job) for job in jobs]
    names = dict.fromkeys(name for job in settings for name in job)
    return [name for name in names if len({job.get(name) for job in settings}) > 1]


def setting_values(job: Job, names: Sequence[str]) -> list[str]:
    """Returns the values of the named settings as written on the command line, or "-" for those that are not given."""
    settings = _settings(job)
    return [settings.get(name, "-") for name in names]


def _settings(job: Job) -> dict[str, str]:
    return dict(override.split("=", 1) for override in job.overrides)
