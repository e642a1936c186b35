"""Host memory as a place for tensors: of exactly the planned size, and cut into buffers."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memo.engine.copy_streams import CopyError, CopyEvent, CopyStream
from lightning_memo.engine.memory.host_pages import HostPages, in_parts
from lightning_memo.engine.memory.places import FreeSpace, Room, Store
from lightning_memo.engine.memory.saved_storages import POISON
from lightning_memo.engine.timeline_recorder import Subject

PIECE_BYTES = 256 * 2**20
"""Longest copy to the host. Attention waits only for the piece that has its keys, and not for all that follow."""


class Arena:
    """One allocation, from which buffers are cut.

    Args:
        memory: The allocation, uint8.
        spare: Another arena, which gives the buffers that this one has no room for.
    """

    def __init__(self, memory: Tensor, spare: Arena | None = None) -> None:
        self.size_bytes, self._spare = memory.nbytes, spare
        self._memory = memory
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
        start = buffer.storage_offset() - self._memory.storage_offset()
        self._space.give_back(range(start, start + buffer.nbytes))


class HostArena(Arena):
    """An arena of host memory, whose buffers can be copied to and from as soon as they are acquired.

    Args:
        pages: The host memory.
        span: The part of it that belongs to the arena.
        spare: See :class:`Arena`.
    """

    def __init__(self, pages: HostPages, span: range, spare: Arena | None = None) -> None:
        super().__init__(pages.memory[span.start : span.stop], spare)
        self._pages = pages

    @override
    def acquire(self, size_bytes: int) -> Tensor | None:
        """Return a free buffer, see :class:`Arena`, once its pages are locked.

        Raises:
            MemoryError: The host refuses the page lock.
        """
        buffer = super().acquire(size_bytes)
        if buffer is not None and buffer.device.type == "cpu":
            self._pages.wait(buffer.storage_offset() + size_bytes)
        return buffer


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
        event, start = None, 0
        for part in in_parts(self.memory):
            target = destination[start : start + part.nbytes]
            event = stream.copy(target, part, self.written, subject=subject)
            start += part.nbytes
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
        self.pieces, copied = [], 0
        targets = self.memory[start : start + source.nbytes].split(PIECE_BYTES)
        for target in (part for piece in targets for part in in_parts(piece)):
            bytes_of_part = source[copied : copied + target.nbytes]
            self._copies.write = event = self._store.out.copy(target, bytes_of_part, subject=subject)
            copied += target.nbytes
            self.pieces.append((start + copied, event))
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
        pages: The host memory, of which the store takes a part.
        span: The part.
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
        pages: HostPages,
        span: range,
        out: CopyStream,
        back: CopyStream,
        poison: bool,
        spare_bytes: int = 0,
    ) -> None:
        super().__init__(len(span))
        spare = Arena(torch.empty(spare_bytes, dtype=torch.uint8, device=pages.device)) if spare_bytes else None
        self.arena = HostArena(pages, span, spare)
        self.out, self.back, self.poison = out, back, poison
        self.closed = False
        self._device = pages.device
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
        self.abandon()  # what still refers to buffers must not read what others write there
        self.closed = True
