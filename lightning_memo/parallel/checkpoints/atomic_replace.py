"""Atomic replacement of files and folders: readers see the old one or the new one, even after a crash.

Unfinished folders, and those being removed, are in a folder `.unfinished` next to their target. It is on the same file
system, so a rename is atomic. An existing folder cannot be replaced by a single rename. It is renamed to
`last.previous.ckpt` (for `last.ckpt`) until the new one is in place. Lightning also reads this name as a "last"
checkpoint, so `ckpt_path="last"` finds it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

_UNFINISHED = ".unfinished"


def begin(target: Path) -> Path:
    """Returns an empty folder to write to, after removing unfinished folders of killed processes.

    Args:
        target: Final path of the folder. Missing parents are created.
    """
    shutil.rmtree(target.parent / _UNFINISHED, ignore_errors=True)
    unfinished = _unfinished(target)
    unfinished.mkdir(parents=True)
    return unfinished


def commit(unfinished: Path, target: Path) -> None:
    """Replaces `target`, a file, folder or link or nothing, by a folder from :func:`begin`.

    A link itself is replaced, not the file or folder it points to.
    """
    _sync(unfinished)
    previous = previous_of(target)
    if os.path.lexists(target):
        _remove(previous)
        target.rename(previous)
    unfinished.rename(target)
    _sync_folder(target.parent)
    _remove(previous)
    _sweep(target)


def abort(target: Path) -> None:
    """Removes the folder that :func:`begin` returned."""
    shutil.rmtree(_unfinished(target), ignore_errors=True)
    _sweep(target)


def remove(target: Path) -> None:
    """Removes a file, link or folder atomically. Does nothing if it does not exist."""
    _remove(target)
    _sweep(target)


def find_complete(target: Path) -> Path | None:
    """Returns `target`, or its predecessor if a killed process left only that one; None if neither exists."""
    # The predecessor is removed after the new target is in place, so check the target twice.
    candidates = (target, previous_of(target), target)
    return next((path for path in candidates if path.exists()), None)


def previous_of(target: Path) -> Path:
    """Returns the temporary name of the old target while it is replaced."""
    return target.with_name(f"{target.stem}.previous{target.suffix}")


def _unfinished(target: Path) -> Path:
    return target.parent / _UNFINISHED / target.name


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        doomed = path.parent / _UNFINISHED / f"removed {path.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        doomed.parent.mkdir(exist_ok=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def _sweep(target: Path) -> None:
    with contextlib.suppress(OSError):  # not empty: in use by another target
        (target.parent / _UNFINISHED).rmdir()


def _sync(folder: Path) -> None:
    """Flushes a folder and its contents to the disk. Otherwise a power failure could keep the rename but lose files."""
    for path in folder.rglob("*"):
        _sync_folder(path) if path.is_dir() else _sync_file(path)
    _sync_folder(folder)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
