"""Files and folders that take their place whole: a reader sees the old one or the new one, after a crash as well.

What is not finished, and what is being removed, lies in a folder `.unfinished` beside its target, so on the same file
system, where a rename is atomic. A folder that is there already cannot be replaced by one rename; it waits as
`last.previous.ckpt` (for `last.ckpt`) while the new one takes its place. That name still reads as a "last" checkpoint
to Lightning, so that `ckpt_path="last"` finds it, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

_UNFINISHED = ".unfinished"


def begin(target: Path) -> Path:
    """Returns an empty folder to write to, after sweeping what killed processes left.

    Args:
        target: Where the folder will go; its parents are made.
    """
    shutil.rmtree(target.parent / _UNFINISHED, ignore_errors=True)
    unfinished = _unfinished(target)
    unfinished.mkdir(parents=True)
    return unfinished


def commit(unfinished: Path, target: Path) -> None:
    """Puts a folder that :func:`begin` gave in the place of `target`, whatever is there: file, folder or link.

    A link is replaced, not what it points to.
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
    """Removes the folder that :func:`begin` gave."""
    shutil.rmtree(_unfinished(target), ignore_errors=True)
    _sweep(target)


def remove(target: Path) -> None:
    """Removes a file, link or folder such that nobody sees half of it; nothing happens if there is none."""
    _remove(target)
    _sweep(target)


def find_complete(target: Path) -> Path | None:
    """Returns `target`, or its predecessor if a killed process left only that; None without both."""
    # The predecessor goes away after the target has come back, so look at the target twice.
    candidates = (target, previous_of(target), target)
    return next((path for path in candidates if path.exists()), None)


def previous_of(target: Path) -> Path:
    """Where the old one waits while the new one takes its place."""
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
    with contextlib.suppress(OSError):  # not empty: another target's
        (target.parent / _UNFINISHED).rmdir()


def _sync(folder: Path) -> None:
    """Writes a folder to the disk, with all that it holds: a rename may else survive a power failure, its files not."""
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
