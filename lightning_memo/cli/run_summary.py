"""Settings and results of a training run: a small JSON file, which the report of a sweep reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from lightning_memo.utils.files import replacing

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Settings and results of one run. Results that were not measured are None."""

    overrides: Sequence[str]
    """Overrides of the command line, as ``name=value``."""
    status: Literal["ok", "failed"]
    message: str = ""
    """Reason for the failure, in one line."""
    processes: int = 1
    """Number of processes on all nodes. Times and sizes are of rank zero; tokens and losses are of all processes."""
    seq_len: int | None = None
    batch_size: int | None = None
    """Sequences per batch of one data-parallel process."""
    alpha: float | None = None
    """Fraction of the tokens whose activations were swapped, or None if the strategy does not swap."""
    step_seconds: float | None = None
    """Median time of an optimizer step."""
    tokens_per_second: float | None = None
    step_memory_bytes: int | None = None
    """Peak device memory of a step, gradients included, without parameters and optimizer state."""
    host_bytes: int | None = None
    """Host memory that holds swapped activations."""
    spill_bytes: int | None = None
    """Disk space that holds swapped activations for which host memory is too small."""
    arena_bytes: int | None = None
    """Size of the planned memory arena, or None if memory was not planned."""
    train_loss: float | None = None
    """Mean loss of the last steps, those before a checkpoint that was resumed included, in nats per token."""
    val_loss: float | None = None
    unigram_entropy: float | None = None
    """Lowest possible loss without context, in nats per token of the training text."""

    def save(self, folder: Path) -> None:
        """Writes the summary into a run's folder."""
        with replacing(folder / SUMMARY_FILE) as path:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RunSummary:
        """Reads what :meth:`save` wrote.

        Raises:
            OSError: The folder contains no summary.
        """
        return cls(**json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")))


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
