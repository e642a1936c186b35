"""The libraries that this package requires, as its metadata says, and their installed versions."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

PACKAGE = "lightning-memo"
_EXTRA = re.compile(r"""extra == ["']([\w-]+)""")


@dataclass(frozen=True, slots=True)
class Library:
    """A required library.

    Attributes:
        requirement: Its name, and the versions that are tested.
        extra: The extra that it belongs to; empty if the package itself needs it.
        version: The installed version; `None` if it is not installed.
    """

    requirement: Requirement
    extra: str
    version: str | None

    @property
    def is_tested(self) -> bool:
        """Whether an allowed version is installed."""
        return self.version is not None and self.requirement.specifier.contains(self.version, prereleases=True)


@functools.cache  # reading the metadata of all libraries takes as long as several steps of a small model
def required_libraries() -> tuple[Library, ...]:
    """Return the libraries that the package and its extras require; none if it is not installed."""
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return ()
    return tuple(_library(Requirement(line)) for line in lines)


def _library(requirement: Requirement) -> Library:
    extra = _EXTRA.search(str(requirement.marker))
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        version = None
    requirement.marker = None
    return Library(requirement, "" if extra is None else extra[1], version)
