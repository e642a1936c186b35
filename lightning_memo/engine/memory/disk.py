"""A file on a local disk as a place for tensors, which go there and back through bounce buffers on the host.

A copy stream moves bytes between device and host. A few threads move them between host and file, with blocking system
calls that need neither another copy nor Python's global interpreter lock. One more thread per direction coordinates
both, so that the training thread only submits work and waits for events.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memo.artifacts.slot_layouts import DiskLayout, whole_blocks
from lightning_memo.engine.copy_streams import (
    CopyError,
    CopyEvent,
    CopyStream,
    Delays,
    LaterEvent,
    TestMode,
    delays_of,
    make_copy_stream,
    use_device,
)
from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.engine.memory.places import FreeSpace, Room, Store
from lightning_memo.engine.memory.saved_storages import POISON
from lightning_memo.engine.timeline_recorder import NOBODY, Subject, TimelineRecorder
from lightning_memo.utils.units import format_bytes


class DiskError(OSError):
    """The disk refused space, or it failed."""


class DiskFile:
    """A file of exactly the planned size, whose space is reserved when it is opened.

    The file has no name. The kernel therefore frees its space when the process ends, even if it is killed, and no other
    process can open it. All methods are thread-safe.

    Args:
        folder: Folder on the disk.
        size_bytes: Size of the file, a multiple of the block size.

    Raises:
        DiskError: The disk does not have the space.
        ValueError: The folder cannot be used.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self._file = open_unnamed(folder)
        try:
            _reserve(self._file.fileno(), size_bytes)
        except OSError as error:
            self.close()
            raise DiskError(_refusal(folder, size_bytes, error)) from error
        self.direct = _use_direct_io(self._file.fileno())
        self.space = FreeSpace(size_bytes)

    def write(self, memory: Tensor, offset_bytes: int) -> None:
        """Write bytes.

        Args:
            memory: Aligned host memory, uint8; its size is a multiple of the block size.
            offset_bytes: Offset in the file, a multiple of the block size.

        Raises:
            DiskError: The disk failed.
        """
        self._move(os.pwritev, "writing to", memory, offset_bytes)

    def read(self, memory: Tensor, offset_bytes: int) -> None:
        """Read bytes that were written, with arguments as in :meth:`write`.

        Raises:
            DiskError: The disk failed.
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

    def _failure(self, doing: str, error: OSError) -> DiskError:
        return DiskError(
            f"{doing} the spill file in {self.folder} failed: {error.strerror}; the step is lost: check the disk, or "
            "train without disk_path"
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
            f'disk_path="{folder}": no file can be created there ({error.strerror}): give a folder on a local disk '
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
            "process may not be that large: raise the limit (ulimit -f), or raise host_memory by as much"
        )
    return (
        f"spilling needs {format_bytes(size_bytes)} ({size_bytes} bytes) in {folder}, which has {format_bytes(free)} "
        f"free ({error.strerror}): free space there, give a folder on another disk, or raise host_memory by as much"
    )


_DISK_THREADS = 2  # per direction, so that the disk already has the next request when one ends


@dataclass(slots=True)
class DiskWrite:
    """A write from the device to the file.

    Attributes:
        left: End of the copies out of the device.
        requests: The disk's requests; the list is complete once `left` has come.
    """

    left: LaterEvent
    requests: list[Future[None]] = field(default_factory=list)

    def synchronize(self) -> None:
        """Block until the bytes are in the file.

        Raises:
            DiskError: The disk failed.
        """
        self.left.synchronize()
        for request in self.requests:
            request.result()


@dataclass(slots=True)
class _Bounce:
    """A bounce buffer with its last disk request and its last copy, which must end before it is used again."""

    memory: Tensor
    request: Future[None] | None = None
    copy: CopyEvent | None = None


class _Direction:
    """One direction of copies: bounce buffers used in turn, a copy stream, a coordinating thread and disk threads.

    Args:
        name: Name of the threads.
        file: The spill file.
        stream: Copy stream between the device and the bounce buffers, which nothing else uses.
        buffers: Bounce buffers, all of the same size.
        device: Device at the other end of the copy stream.
        delays: Delays before disk requests in test mode, in which buffers are also filled with NaN before each use.
    """

    def __init__(
        self,
        name: str,
        file: DiskFile,
        stream: CopyStream,
        buffers: Sequence[Tensor],
        device: torch.device,
        delays: Delays | None,
    ) -> None:
        self._file, self._stream, self._delays = file, stream, delays
        self._buffers = deque(_Bounce(memory) for memory in buffers)
        self._coordinator = ThreadPoolExecutor(1, f"spill-{name}", initializer=use_device, initargs=(device,))
        self._disk = ThreadPoolExecutor(_DISK_THREADS, f"spill-{name}-disk")

    def _turns(self, on_device: Tensor, offset_bytes: int) -> Iterator[tuple[Tensor, int, _Bounce]]:
        """Iterate over chunks of device bytes, with their offset in the file and a free bounce buffer for each."""
        for chunk in on_device.split(self._buffers[0].memory.nbytes):
            self._buffers.rotate(-1)
            bounce = self._buffers[-1]
            if bounce.request is not None:
                wait([bounce.request])
            if bounce.copy is not None:
                bounce.copy.synchronize()
            if self._delays is not None:
                bounce.memory.fill_(POISON)
            yield chunk, offset_bytes, bounce
            offset_bytes += chunk.nbytes

    def _pause(self) -> None:
        if self._delays is not None:
            time.sleep(self._delays.seconds())

    def synchronize(self) -> None:
        """Block until all submitted work has ended, successfully or not."""
        self._coordinator.submit(int).result()
        wait([bounce.request for bounce in self._buffers if bounce.request is not None])
        self._stream.synchronize()

    def close(self) -> None:
        self._coordinator.shutdown()
        self._disk.shutdown()
        self._stream.close()


class _Writer(_Direction):
    """Copies from the device to the file."""

    def write(self, source: Tensor, offset_bytes: int, subject: Subject) -> DiskWrite:
        result = DiskWrite(self._stream.later())
        self._coordinator.submit(self._send, source, offset_bytes, self._stream.computed(), subject, result)
        return result

    def _send(
        self, source: Tensor, offset_bytes: int, computed: CopyEvent | None, subject: Subject, result: DiskWrite
    ) -> None:
        try:
            for chunk, offset, bounce in self._turns(source, offset_bytes):
                bounce.copy = self._stream.copy_after(bounce.memory[: chunk.nbytes], chunk, computed, subject=subject)
                blocks = bounce.memory[: whole_blocks(chunk.nbytes)]
                bounce.request = self._disk.submit(self._write, blocks, offset, bounce.copy)
                result.requests.append(bounce.request)
                last = bounce.copy
        except BaseException as error:  # raised where the copy is waited for
            result.left.fail(error)
        else:
            result.left.start(last)

    def _write(self, blocks: Tensor, offset_bytes: int, copy: CopyEvent) -> None:
        copy.synchronize()
        self._pause()
        self._file.write(blocks, offset_bytes)


class _Reader(_Direction):
    """Copies from the file to the device."""

    def read(self, destination: Tensor, offset_bytes: int, write: DiskWrite | None, subject: Subject) -> CopyEvent:
        arrival, computed = self._stream.later(), self._stream.computed()
        self._coordinator.submit(self._receive, destination, offset_bytes, write, computed, subject, arrival)
        return arrival

    def _receive(
        self,
        destination: Tensor,
        offset_bytes: int,
        write: DiskWrite | None,
        computed: CopyEvent | None,
        subject: Subject,
        arrival: LaterEvent,
    ) -> None:
        under_way: deque[tuple[Tensor, _Bounce]] = deque()

        def land() -> None:
            chunk, bounce = under_way.popleft()
            assert bounce.request is not None
            bounce.request.result()
            bounce.copy = self._stream.copy_after(chunk, bounce.memory[: chunk.nbytes], computed, subject=subject)

        try:
            if write is not None:
                write.synchronize()
            for chunk, offset, bounce in self._turns(destination, offset_bytes):
                blocks = bounce.memory[: whole_blocks(chunk.nbytes)]
                bounce.request = self._disk.submit(self._read, blocks, offset)
                under_way.append((chunk, bounce))
                if len(under_way) == len(self._buffers):
                    land()
            while under_way:
                land()
        except BaseException as error:  # raised where the copy is waited for
            arrival.fail(error)
        else:
            arrival.start(self._buffers[-1].copy)

    def _read(self, blocks: Tensor, offset_bytes: int) -> None:
        self._pause()
        self._file.read(blocks, offset_bytes)


class DiskRange(Room):
    """A range of the file.

    Args:
        store: Copies the bytes.
        taken: The range.
    """

    def __init__(self, store: DiskStore, taken: range) -> None:
        self._store, self._taken = store, taken
        self._write: DiskWrite | None = None
        self._arrival: CopyEvent | None = None

    @override
    def write(self, source: Tensor, *, subject: Subject | None = None) -> CopyEvent:
        """See :meth:`Room.write`. The last block is padded."""
        self._store.written_bytes += whole_blocks(source.nbytes)
        self._write = self._store.writer.write(source, self._taken.start, subject or NOBODY)
        return self._write.left

    @override
    def read(self, destination: Tensor, *, subject: Subject | None = None) -> CopyEvent:
        self._store.read_bytes += whole_blocks(destination.nbytes)
        reader, start = self._store.reader, self._taken.start
        self._arrival = reader.read(destination, start, self._write, subject or NOBODY)
        return self._arrival

    def synchronize(self) -> None:
        """Block until the bytes that were written are in the file.

        Raises:
            DiskError: The disk failed.
        """
        if self._write is not None:
            self._write.synchronize()

    @override
    def release(self) -> None:
        with contextlib.suppress(DiskError, CopyError):  # was raised where the bytes were needed
            if self._arrival is not None:
                self._arrival.wait()
        with contextlib.suppress(DiskError, CopyError):
            if self._write is not None:
                self._write.left.wait()
                self.synchronize()
        self._store.file.space.give_back(self._taken)


class DiskStore(Store):
    """A file on a disk, and the copies to and from it.

    Args:
        folder: Folder on the disk.
        size_bytes: Size of the file.
        sizes: Sizes for the largest slot, including the number and size of the bounce buffers.
        device: Device of the tensors.
        test_mode: Random delays and poisoned buffers that reveal copy races.
        recorder: Records copies between the device and the bounce buffers, and the computation's waits for them.

    Raises:
        DiskError: The disk does not have the space.
        ValueError: The folder cannot be used.
        MemoryError: The host refuses the page lock.
    """

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        sizes: DiskLayout,
        device: torch.device,
        test_mode: TestMode | None = None,
        recorder: TimelineRecorder | None = None,
    ) -> None:
        super().__init__(sizes.bounce_bytes)
        self.file = DiskFile(folder, size_bytes)
        if not self.file.direct:
            warnings.warn(
                f"{folder} is on a file system without direct I/O: spilled bytes go through the page cache, which "
                "costs host memory and time. Set disk_path to a folder on a local disk",
                stacklevel=2,
            )
        self._pages = HostPages(device)
        self._pages.hold(sizes.bounce_bytes)
        self._pages.wait()
        buffers = self._pages.memory.split(sizes.chunk_bytes)
        out, back = delays_of(test_mode, 2), delays_of(test_mode, 3)
        stream = make_copy_stream(device, "spill", out, recorder)
        self.writer = _Writer("out", self.file, stream, buffers[: sizes.write_buffers], device, out)
        stream = make_copy_stream(device, "unspill", back, recorder)
        self.reader = _Reader("back", self.file, stream, buffers[sizes.write_buffers :], device, back)

    @property
    @override
    def rooms(self) -> int:
        return len(self.file.space)

    @property
    @override
    def host_bytes_in_use(self) -> int:
        return self.host_bytes

    @override
    def take(self, size_bytes: int) -> DiskRange | None:
        taken = self.file.space.take(whole_blocks(size_bytes))
        return None if taken is None else DiskRange(self, taken)

    @override
    def abandon(self) -> None:
        self.writer.synchronize()
        self.reader.synchronize()

    @override
    def close(self) -> None:
        """Wait for the work under way, and free the file's space and the bounce buffers."""
        self.writer.close()
        self.reader.close()
        self.file.close()
        self._pages.close()
