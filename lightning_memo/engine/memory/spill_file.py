"""A file on a local disk for activations that do not fit in host memory, written and read with direct I/O."""

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
    """The disk refused space, or it failed."""


class SpillFile:
    """A file of exactly the planned size, whose space is reserved when it is opened.

    The file has no name. The kernel therefore frees its space when the process ends, even if it is killed, and no other
    process can open it. All methods are thread-safe.

    Args:
        folder: Folder on the disk.
        size_bytes: Size of the file, a multiple of the block size.

    Raises:
        SpillError: The disk does not have the space.
        ValueError: The folder cannot be used.
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
        """Write bytes.

        Args:
            memory: Aligned host memory, uint8; its size is a multiple of the block size.
            offset_bytes: Offset in the file, a multiple of the block size.

        Raises:
            SpillError: The disk failed.
        """
        self._move(os.pwritev, "writing to", memory, offset_bytes)

    def read(self, memory: Tensor, offset_bytes: int) -> None:
        """Read bytes that were written, with arguments as in :meth:`write`.

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
            f"{doing} the spill file in {self.folder} failed: {error.strerror}; the step is lost: check the disk, or "
            "train without spill_path"
        )

    def close(self) -> None:
        """Free the space of the file, even if a forked process still has it open."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()


def open_unnamed(folder: Path) -> IO[bytes]:
    """Open a file in `folder` that has no name.

    Raises:
        ValueError: No file can be created there.
    """
    try:
        return tempfile.TemporaryFile(dir=folder, prefix="lightning_memo_", buffering=0)
    except OSError as error:
        raise ValueError(
            f'spill_path="{folder}": no file can be created there ({error.strerror}): give a folder on a local disk '
            "that this process may write to"
        ) from None


def free_disk_bytes(folder: Path) -> int:
    """Return the bytes that the file system of a folder has free for this user."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve the space of an open file."""
    status = os.fstatvfs(descriptor)
    # A file system takes all free space before it refuses a larger request, and other processes would find a full disk.
    if size_bytes > status.f_bavail * status.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if size_bytes:
        os.posix_fallocate(descriptor, 0, size_bytes)


def _use_direct_io(descriptor: int) -> bool:
    """Turn off the page cache, which would take the memory that spilling saves; returns whether this is possible."""
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
            "process may not be that large: raise the limit (ulimit -f), lower spill_memory, or raise host_memory"
        )
    return (
        f"spilling needs {format_bytes(size_bytes)} ({size_bytes} bytes) in {folder}, which has {format_bytes(free)} "
        f"free ({error.strerror}): free space, lower spill_memory, raise host_memory, or give a folder on another disk"
    )
