"""Host memory of exactly the planned size, cut into regions."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyError, CopyEvent
from lightning_memo.engine.memory.saved_storages import POISON


class FreeSpace:
    """Which ranges of `[0, size_bytes)` are taken."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.bytes_in_use = 0
        self._taken: list[range] = []  # in the order of their places

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, size_bytes: int) -> range | None:
        """A free range, or `None`."""
        stops = [0, *(taken.stop for taken in self._taken[-1:])]
        # What is taken first is given back last, so there is room at the end, or seldom between two ranges.
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
        self.bytes_in_use -= len(taken)
        if self._taken[-1] == taken:
            self._taken.pop()
        else:
            self._taken.remove(taken)


def host_memory(size_bytes: int, pinned: bool) -> tuple[Tensor, PageLock | None]:
    """Host memory of its own pages, uint8 `[size_bytes]`; page-locked when `pinned`.

    Direct I/O needs whole pages, and so do page locks: two must not share one. Large pages are locked faster. A locked
    page would be copied for every forked process, like a worker of a data loader, so those get none of them.

    Raises:
        MemoryError: The host refuses the memory or the page lock.
    """
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8), None
    try:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{size_bytes} bytes of host memory are refused ({error.strerror}): lower host_memory"
        ) from None
    with contextlib.suppress(OSError):  # kernels can be built without
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if not pinned:
        return memory, None
    pages.madvise(mmap.MADV_DONTFORK)
    return memory, PageLock(memory)


class PageLock:
    """Locks the pages of host memory in one piece, so that the device can copy to and from it by itself.

    PyTorch's own pinned pool rounds every request up to a power of two; registering plain memory does not. The pages
    are unlocked by `release`, with the lock, or when the process ends.

    Raises:
        MemoryError: The host refuses.
    """

    def __init__(self, memory: Tensor) -> None:
        self._unlock = weakref.finalize(self, _unlock, memory)
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if error != torch.cuda.cudart().cudaError.success:
            self._unlock.detach()
            raise MemoryError(
                f"page-locking {memory.nbytes} bytes of host memory failed ({error}): lower host_memory, "
                "or raise the limit of locked memory (ulimit -l)"
            )

    def release(self) -> None:
        """Unlock the pages. No copy may be under way."""
        self._unlock()


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class HostArena:
    """One allocation of exactly the planned size, cut into regions; page-locked when `pinned`.

    Raises:
        MemoryError: The host refuses the allocation or the page lock.
    """

    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self._memory, self._lock = host_memory(size_bytes, pinned)
        self._space = FreeSpace(size_bytes)

    @property
    def bytes_in_use(self) -> int:
        return self._space.bytes_in_use

    @property
    def regions_in_use(self) -> int:
        return len(self._space)

    def acquire(self, size_bytes: int) -> Tensor | None:
        """A free region, uint8 `[size_bytes]`, or `None`."""
        taken = self._space.take(size_bytes)
        return None if taken is None else self._memory[taken.start : taken.stop]

    def release(self, region: Tensor) -> None:
        self._space.give_back(range(region.storage_offset(), region.storage_offset() + region.nbytes))

    def close(self) -> None:
        """Unlock the pages. No copy may be under way."""
        if self._lock is not None:
            self._lock.release()


@dataclass(slots=True)
class LastCopies:
    """The last copy to a region, and the last from it."""

    write: CopyEvent | None = None
    read: CopyEvent | None = None


class HostRoom:
    """A region that is held by whoever needs it, and goes back when that is gone; copies are waited for first.

    Attributes:
        memory: The bytes, uint8.
        copies: The last copies to and from it.
    """

    def __init__(self, memory: Tensor, arena: HostArena | None, poison: bool) -> None:
        self.memory = memory
        self.copies = LastCopies()
        self._release = weakref.finalize(self, _give_back, memory, arena, poison, self.copies)
        self._release.atexit = False

    @property
    def alive(self) -> bool:
        """Whether the region is held."""
        return self._release.alive

    def release(self) -> None:
        """Give the region back."""
        self._release()


def _give_back(memory: Tensor, arena: HostArena | None, poison: bool, copies: LastCopies) -> None:
    for event in (copies.write, copies.read):
        with contextlib.suppress(CopyError):  # told where the bytes were needed
            if event is not None:
                event.wait()
                if poison:
                    event.synchronize()  # the poison is written by the CPU at once
    if poison:
        memory.fill_(POISON)
    if arena is not None:
        arena.release(memory)
