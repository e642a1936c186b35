"""A file for swapped activations that the host has no room for, written and read by direct I/O."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from torch import Tensor

from lightning_memo.engine.memory.host_arena import FreeSpace
from lightning_memo.utils.units import format_bytes


class SpillError(OSError):
    """The disk refuses space, or failed."""


class SpillFile:
    """A file of exactly the planned size, whose space is reserved when it is opened.

    It has no name: when the process ends, killed or not, the kernel gives its space back, and no other process can take
    it for its own. All methods may be called by several threads at once.

    Args:
        folder: On the disk.
        size_bytes: Of the file, a multiple of the block size.

    Raises:
        SpillError: The disk has not got the space.
        ValueError: The folder is not usable.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder, self.size_bytes = folder, size_bytes
        self._file = open_unnamed(folder)
        try:
            _reserve(self._file.fileno(), size_bytes)
        except OSError as error:
            self.close()
            raise SpillError(_refusal(folder, size_bytes, error)) from error
        self.direct = _use_direct_io(self._file.fileno())
        self.space = FreeSpace(size_bytes)

    def write(self, memory: Tensor, offset_bytes: int) -> None:
        """Write bytes: a multiple of the block size at a multiple of it, from aligned memory.

        Raises:
            SpillError: The disk failed.
        """
        self._move(os.pwritev, "writing to", memory, offset_bytes)

    def read(self, memory: Tensor, offset_bytes: int) -> None:
        """Read bytes that were written, as :meth:`write` takes them.

        Raises:
            SpillError: The disk failed.
        """
        self._move(os.preadv, "reading from", memory, offset_bytes)

    def _move(self, call: Callable[..., int], doing: str, memory: Tensor, offset_bytes: int) -> None:
        view, done = memoryview(memory.numpy()), 0
        try:
            while done < memory.nbytes:
                count = call(self._file.fileno(), [view[done:]], offset_bytes + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file ends too early")
                done += count
        except OSError as error:
            raise self._failure(doing, error) from error

    def _failure(self, doing: str, error: OSError) -> SpillError:
        return SpillError(
            f"{doing} the spill file in {self.folder} failed: {error.strerror}; the step is lost: look at the disk, or "
            "train without spill_path"
        )

    def close(self) -> None:
        """Give the space back, also where a forked process still has the file open."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()


def open_unnamed(folder: Path) -> IO[bytes]:
    """An open file that no name in `folder` leads to.

    Raises:
        ValueError: Files can't be made there.
    """
    try:
        return tempfile.TemporaryFile(dir=folder, prefix="lightning_memo_", buffering=0)
    except OSError as error:
        raise ValueError(
            f'spill_path="{folder}": no file can be made there ({error.strerror}): give a folder on a local disk that '
            "this process may write to"
        ) from None


def free_disk_bytes(folder: Path) -> int:
    """What the file system of a folder has free for this user."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Give an open file its space."""
    status = os.fstatvfs(descriptor)
    # Asked for more than there is, file systems take all of it before they refuse: others would find the disk full.
    if size_bytes > status.f_bavail * status.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if size_bytes:
        os.posix_fallocate(descriptor, 0, size_bytes)


def _use_direct_io(descriptor: int) -> bool:
    """Turn the page cache off, where the file system can: it would take the memory that spilling saves."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return False
    return True


def _refusal(folder: Path, size_bytes: int, error: OSError) -> str:
    free = free_disk_bytes(folder)
    if error.errno == errno.EFBIG:
        return (
            f"spilling needs a file of {format_bytes(size_bytes)} ({size_bytes} bytes) in {folder}, and files of this "
            "process may not be so large: raise the limit (ulimit -f), lower spill_memory, or raise host_memory"
        )
    return (
        f"spilling needs {format_bytes(size_bytes)} ({size_bytes} bytes) in {folder}, which has {format_bytes(free)} "
        f"free ({error.strerror}): free space, lower spill_memory, raise host_memory, or give a folder on another disk"
    )
