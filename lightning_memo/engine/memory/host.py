"""Host memory as a place for tensors: page-locked, of exactly the planned size, and cut into buffers."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memo.engine.copy_streams import CopyError, CopyEvent, CopyStream
from lightning_memo.engine.memory.places import FreeSpace, Room, Store
from lightning_memo.engine.memory.saved_storages import POISON
from lightning_memo.engine.timeline_recorder import Subject

_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # of Linux 5.14
_MOST_THREADS = 16  # a few saturate the memory of a socket
_POPULATED_BYTES = 256 * 2**20  # at once
PIECE_BYTES = 256 * 2**20
"""Longest copy to the host. Attention waits only for the piece that has its keys, and not for all that follow."""
_DEVICES = Path("/sys/bus/pci/devices")


class Arena:
    """One allocation, from which buffers are cut.

    Args:
        memory: The allocation, uint8.
        lock: Its page lock, if there is one.
        spare: Another arena, which gives the buffers that this one has no room for.
    """

    def __init__(self, memory: Tensor, lock: PageLock | None = None, spare: Arena | None = None) -> None:
        self.size_bytes, self._spare = memory.nbytes, spare
        self._memory, self._lock = memory, lock
        self._space = FreeSpace(memory.nbytes)

    @property
    def bytes_in_use(self) -> int:
        return self._space.bytes_in_use

    @property
    def buffers_in_use(self) -> int:
        """Number of buffers that were acquired and not released."""
        return len(self._space) + (0 if self._spare is None else self._spare.buffers_in_use)

    def acquire(self, size_bytes: int) -> Tensor | None:
        """Return a free buffer, uint8 `[size_bytes]`, or `None` if the arena is too full."""
        taken = self._space.take(size_bytes)
        if taken is not None:
            return self._memory[taken.start : taken.stop]
        return None if self._spare is None else self._spare.acquire(size_bytes)

    def release(self, buffer: Tensor) -> None:
        """Give back a buffer that `acquire` returned."""
        own = buffer.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()
        if self._spare is not None and not own:
            self._spare.release(buffer)
            return
        self._space.give_back(range(buffer.storage_offset(), buffer.storage_offset() + buffer.nbytes))

    def close(self) -> None:
        """Unlock the pages. The caller makes sure that no copy is under way."""
        if self._lock is not None:
            self._lock.release()


class HostArena(Arena):
    """An arena of host memory of exactly the planned size.

    Args:
        size_bytes: Size of the arena.
        pinned: Whether its pages are locked.
        spare: See :class:`Arena`.

    Raises:
        MemoryError: The host refuses the allocation or the page lock.
    """

    def __init__(self, size_bytes: int, pinned: bool, spare: Arena | None = None) -> None:
        super().__init__(*host_memory(size_bytes, pinned), spare)


@dataclass(slots=True)
class LastCopies:
    """The last copy to a host buffer (`write`) and the last copy from it (`read`)."""

    write: CopyEvent | None = None
    read: CopyEvent | None = None


@dataclass(frozen=True, slots=True)
class HostRange:
    """A range of bytes on the host that is copied to the device.

    Attributes:
        size_bytes: Number of bytes.
        memory: The bytes, uint8 `[size_bytes]`; `None` reads zeros.
        written: End of the last copy to these bytes.
        copies: Where a read is noted, if the owner of the bytes may release them while they are read.
    """

    size_bytes: int
    memory: Tensor | None
    written: CopyEvent | None = None
    copies: LastCopies | None = None

    def read(self, destination: Tensor, stream: CopyStream, subject: Subject | None = None) -> CopyEvent | None:
        """Start copying the bytes to the device: all copies from the host start here.

        Args:
            destination: Memory for the bytes, uint8.
            stream: The copy stream.
            subject: The layer call or slice that the bytes belong to; `None` is the one being computed.

        Returns:
            The end of the copy; `None` if there is none.
        """
        if self.memory is None:
            destination.zero_()
            return None
        event = stream.copy(destination, self.memory, self.written, subject=subject)
        if self.copies is not None:
            self.copies.read = event
        return event


class HostBuffer(Room):
    """A host buffer that is given back when this object is released or deleted, after its copies have ended.

    Args:
        memory: The bytes, uint8 `[size_bytes]`.
        store: Copies the bytes.
        arena: The arena they were acquired from; `None` if they are ordinary device memory.

    Attributes:
        memory: See above.
        pieces: Ends of the copies of the last write, each with the end of its bytes in the buffer.
    """

    def __init__(self, memory: Tensor, store: HostStore, arena: Arena | None) -> None:
        self.memory, self._store, self._arena = memory, store, arena
        self.pieces: list[tuple[int, CopyEvent]] = []
        self._copies = LastCopies()
        poison = store.poison and arena is not None
        self._release = weakref.finalize(self, _give_back, memory, arena, poison, self._copies)
        self._release.atexit = False

    @property
    def alive(self) -> bool:
        """Whether the buffer has not been given back, and the memory was not freed."""
        return self._release.alive and not (self._arena is not None and self._store.closed)

    @override
    def write(self, source: Tensor, start: int = 0, *, subject: Subject | None = None) -> CopyEvent:
        """Start copying bytes to the buffer, from byte `start` on; see :meth:`Room.write`."""
        self.pieces, pieces = [], source.split(PIECE_BYTES)
        for piece in pieces:
            stop = start + piece.nbytes
            self._copies.write = event = self._store.out.copy(self.memory[start:stop], piece, subject=subject)
            self.pieces.append((stop, event))
            start = stop
        self._store.written_bytes += source.nbytes
        return event

    @override
    def read(self, destination: Tensor, start: int = 0, *, subject: Subject | None = None) -> CopyEvent:
        """Start copying bytes from the buffer, from byte `start` on; see :meth:`Room.read`."""
        self._store.read_bytes += destination.nbytes
        event = self.range(start, destination.nbytes).read(destination, self._store.back, subject)
        assert event is not None
        return event

    def range(self, start: int, size_bytes: int, written: CopyEvent | None = None) -> HostRange:
        """Return some of the bytes, which attention reads block by block.

        Args:
            start: First byte.
            size_bytes: Number of bytes.
            written: End of the copy that wrote them, if that is not a part of the last write.
        """
        stop = start + size_bytes
        written = written or next((event for end, event in self.pieces if end >= stop), self._copies.write)
        return HostRange(size_bytes, self.memory[start:stop], written, self._copies)

    @override
    def release(self) -> None:
        self._release()


def _give_back(memory: Tensor, arena: Arena | None, poison: bool, copies: LastCopies) -> None:
    for event in (copies.write, copies.read):
        with contextlib.suppress(CopyError):  # was raised where the bytes were needed
            if event is not None:
                event.wait()
                if poison:
                    event.synchronize()  # the CPU writes the poison at once
    if poison:
        memory.fill_(POISON)
    if arena is not None:
        arena.release(memory)


class HostStore(Store):
    """Host memory as a place for tensors.

    Args:
        size_bytes: Size of the arena.
        device: The device.
        out: The copy stream to the host.
        back: The copy stream to the device.
        poison: Whether buffers are overwritten with NaN when they are given back.
        spare_bytes: Memory of the device that stands in for what the host has too little of.

    Attributes:
        arena: The memory.
        closed: Whether the memory was freed. Its buffers must not be read any more.
    """

    def __init__(
        self,
        size_bytes: int,
        device: torch.device,
        out: CopyStream,
        back: CopyStream,
        poison: bool,
        spare_bytes: int = 0,
    ) -> None:
        super().__init__(size_bytes)
        spare = Arena(torch.empty(spare_bytes, dtype=torch.uint8, device=device)) if spare_bytes else None
        self.arena = HostArena(size_bytes, device.type == "cuda", spare)
        self.out, self.back, self.poison = out, back, poison
        self.closed = False
        self._device = device
        self._buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()

    @property
    @override
    def rooms(self) -> int:
        return self.arena.buffers_in_use

    @property
    @override
    def host_bytes_in_use(self) -> int:
        return self.arena.bytes_in_use

    @override
    def take(self, size_bytes: int) -> HostBuffer | None:
        memory = self.arena.acquire(size_bytes)
        return None if memory is None else self._buffer(memory, self.arena)

    def stand_in(self, size_bytes: int) -> HostBuffer:
        """Return a buffer of ordinary device memory, for bytes that the host has no room for."""
        return self._buffer(torch.empty(size_bytes, dtype=torch.uint8, device=self._device), None)

    def _buffer(self, memory: Tensor, arena: Arena | None) -> HostBuffer:
        buffer = HostBuffer(memory, self, arena)
        self._buffers.add(buffer)
        return buffer

    @override
    def abandon(self) -> None:
        """Release all buffers. Whoever owns the copy streams waits for them."""
        for buffer in list(self._buffers):
            buffer.release()

    @override
    def close(self) -> None:
        self.abandon()  # what still refers to buffers must not read freed memory
        self.closed = True
        self.arena.close()


def host_memory(size_bytes: int, pinned: bool) -> tuple[Tensor, PageLock | None]:
    """Allocate host memory on pages of its own.

    Direct I/O and page locks work on complete pages, which two allocations must not share. Huge pages are locked
    faster. Forked processes, such as the workers of a data loader, do not inherit locked pages, because the kernel
    would copy them.

    Args:
        size_bytes: Number of bytes.
        pinned: Whether the pages are locked, so that the device can copy to and from them by itself.

    Returns:
        The memory, uint8 `[size_bytes]`, and its page lock if there is one.

    Raises:
        MemoryError: The host refuses the memory or the page lock.
    """
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8), None
    try:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{size_bytes} bytes of host memory are refused by the system ({error.strerror}): lower host_memory"
        ) from None
    with contextlib.suppress(OSError):  # a kernel can be built without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if not pinned:
        return memory, None
    pages.madvise(mmap.MADV_DONTFORK)
    _populate(memory, _near_cpus(torch.cuda.current_device()))
    return memory, PageLock(memory)


def _near_cpus(device: int) -> set[int]:
    """Return the CPUs of this process that are on the device's NUMA node, or all of them if there is none."""
    own = os.sched_getaffinity(0)
    about = torch.cuda.get_device_properties(device)
    name = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    try:
        near = _parsed_cpus((_DEVICES / name / "local_cpulist").read_text())
    except OSError:  # a container can hide it
        return own
    return own & near or own


def _parsed_cpus(text: str) -> set[int]:
    """Return the CPUs that a list of Linux contains, such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _populate(memory: Tensor, cpus: set[int]) -> None:
    """Map all pages of `memory`, by threads on `cpus`.

    Linux takes a page from the NUMA node of the CPU that writes it first, and clears it. A page lock would do so in one
    thread, on whichever node it runs. What is refused here, as by an older Linux, is left to the page lock.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, size_bytes = memory.data_ptr(), memory.nbytes

    def populate(offset: int) -> None:
        advise(start + offset, min(_POPULATED_BYTES, size_bytes - offset), _POPULATE_WRITE)

    threads = min(_MOST_THREADS, len(cpus))
    with ThreadPoolExecutor(threads, "populate", os.sched_setaffinity, (0, cpus)) as pool:
        pool.map(populate, range(0, size_bytes, _POPULATED_BYTES))


class PageLock:
    """Locks the pages of host memory, so that the device can copy to and from them by itself.

    PyTorch's pinned memory pool rounds every request up to a power of two; registering ordinary memory does not. The
    pages are unlocked by `release`, when this object is deleted, or when the process ends.

    Raises:
        MemoryError: The host refuses the page lock.
    """

    def __init__(self, memory: Tensor) -> None:
        self._unlock = weakref.finalize(self, _unlock, memory)
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if error != torch.cuda.cudart().cudaError.success:
            self._unlock.detach()
            why = torch.cuda.cudart().cudaGetErrorString(error)
            raise MemoryError(
                f"page-locking {memory.nbytes} bytes of host memory failed ({why}): lower host_memory, "
                "or raise the memory limit of the container or job"
            )

    def release(self) -> None:
        """Unlock the pages. The caller makes sure that no copy is under way."""
        self._unlock()


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
