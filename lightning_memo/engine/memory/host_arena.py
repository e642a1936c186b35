"""Host arenas: host memory of exactly the planned size, from which host buffers are cut."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyError, CopyEvent
from lightning_memo.engine.memory.host_pages import host_memory
from lightning_memo.engine.memory.saved_storages import POISON


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
