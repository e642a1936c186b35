"""Host arenas: page-locked host memory of exactly the planned size, from which host buffers are cut."""

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

from lightning_memo.engine.copy_streams import CopyError, CopyEvent
from lightning_memo.engine.memory.saved_storages import POISON

_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # of Linux 5.14
_MOST_THREADS = 16  # a few saturate the memory of a socket
_PIECE_BYTES = 256 * 2**20
_DEVICES = Path("/sys/bus/pci/devices")


class FreeSpace:
    """Book-keeping of the ranges of `[0, size_bytes)` that are taken."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.bytes_in_use = 0
        self._taken: list[range] = []  # sorted by start

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, size_bytes: int) -> range | None:
        """Take a free range, or return `None` if there is none of this size."""
        stops = [0, *(taken.stop for taken in self._taken[-1:])]
        # The range that is taken first is given back last. A new range therefore fits at the end, and only seldom
        # between two others.
        if self.size_bytes - stops[-1] >= size_bytes:
            place, start = len(self._taken), stops[-1]
        else:
            stops = [0, *(taken.stop for taken in self._taken)]
            gaps = (n for n, taken in enumerate(self._taken) if taken.start - stops[n] >= size_bytes)
            place = next(gaps, -1)
            if place < 0:
                return None
            start = stops[place]
        self._taken.insert(place, range(start, start + size_bytes))
        self.bytes_in_use += size_bytes
        return self._taken[place]

    def give_back(self, taken: range) -> None:
        """Free a range that `take` returned."""
        self.bytes_in_use -= len(taken)
        if self._taken[-1] == taken:
            self._taken.pop()
        else:
            self._taken.remove(taken)


class HostArena:
    """One allocation of exactly the planned size, from which buffers are cut.

    Args:
        size_bytes: Size of the arena.
        pinned: Whether its pages are locked.
        spare: Another arena, which gives the buffers that this one has no room for.

    Attributes:
        closed: Whether the arena was closed. Its buffers must not be read any more.

    Raises:
        MemoryError: The host refuses the allocation or the page lock.
    """

    closed = False

    def __init__(self, size_bytes: int, pinned: bool, spare: HostArena | None = None) -> None:
        self.size_bytes, self._spare = size_bytes, spare
        self._memory, self._lock = host_memory(size_bytes, pinned)
        self._space = FreeSpace(size_bytes)

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
        self.closed = True
        if self._lock is not None:
            self._lock.release()


class DeviceArena(HostArena):
    """Memory of the device that is used like a host arena, where the host has too little.

    Args:
        size_bytes: Size of the arena.
        device: The device.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        if device.type == "cpu":
            super().__init__(size_bytes, pinned=False)
            return
        self.size_bytes, self._spare = size_bytes, None
        self._memory, self._lock = torch.empty(size_bytes, dtype=torch.uint8, device=device), None
        self._space = FreeSpace(size_bytes)


@dataclass(slots=True)
class LastCopies:
    """The last copy to a host buffer (`write`) and the last copy from it (`read`)."""

    write: CopyEvent | None = None
    read: CopyEvent | None = None


class HostBuffer:
    """A host buffer that is given back when this object is released or deleted, after its copies have ended.

    Args:
        memory: The bytes, uint8 `[size_bytes]`.
        arena: The arena they were acquired from; `None` if they are ordinary device memory.
        poison: Whether the bytes are overwritten with NaN when they are given back.

    Attributes:
        memory: See above.
        copies: The last copies to and from the buffer.
    """

    def __init__(self, memory: Tensor, arena: HostArena | None, poison: bool) -> None:
        self.memory, self._arena = memory, arena
        self.copies = LastCopies()
        self._release = weakref.finalize(self, _give_back, memory, arena, poison, self.copies)
        self._release.atexit = False

    @property
    def alive(self) -> bool:
        """Whether the buffer has not been given back, and its arena was not closed."""
        return self._release.alive and not (self._arena is not None and self._arena.closed)

    def release(self) -> None:
        """Give the buffer back."""
        self._release()


def _give_back(memory: Tensor, arena: HostArena | None, poison: bool, copies: LastCopies) -> None:
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
        advise(start + offset, min(_PIECE_BYTES, size_bytes - offset), _POPULATE_WRITE)

    threads = min(_MOST_THREADS, len(cpus))
    with ThreadPoolExecutor(threads, "populate", os.sched_setaffinity, (0, cpus)) as pool:
        pool.map(populate, range(0, size_bytes, _PIECE_BYTES))


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
