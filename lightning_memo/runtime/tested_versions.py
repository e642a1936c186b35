"""Warns of libraries that are newer or older than the versions that were tested."""

from __future__ import annotations

import functools
from importlib import metadata

from lightning_utilities.core.rank_zero import rank_zero_warn
from packaging.requirements import Requirement

_PACKAGE = "lightning-memo"


def warn_of_untested_versions() -> None:
    """Warn of each library whose installed version is not one that the requirements of this package allow.

    pip installs allowed versions only, but later commands may replace them.
    """
    for requirement, version in untested_versions():
        rank_zero_warn(
            f"{requirement.name} {version} was not tested with lightning_memo, which uses parts of it that may "
            f'change between versions: if training fails, pip install "{requirement}"'
        )


@functools.cache  # reading the metadata of all libraries takes as long as several steps of a small model
def untested_versions() -> list[tuple[Requirement, str]]:
    """Return the libraries whose installed versions the requirements of this package do not allow."""
    try:
        lines = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:  # these are sources that are not installed
        return []
    found = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None:  # of an extra
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:  # parts of this package need it, which say so
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append((requirement, version))
    return found
