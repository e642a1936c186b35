"""Memory of swapped activations: one host arena, two rounding buffers, and slots that move between them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_memo.engine.arena import HostArena, HostRoom
from lightning_memo.engine.block_reader import BlockReader
from lightning_memo.engine.copies import CopyEvent, CopyStream, Delays, make_copy_stream
from lightning_memo.engine.regions import POISON
from lightning_memo.engine.slot import Slot


@dataclass(frozen=True, slots=True)
class TestMode:
    """Brings out copy races: copies are delayed at random, and every released buffer is filled with NaN.

    Attributes:
        seed: Seed of the delays.
        longest_delay_seconds: Upper bound of one delay.
    """

    __test__ = False  # not a test case, whatever its name

    seed: int = 0
    longest_delay_seconds: float = 0.002


@dataclass(slots=True)
class MemoryStats:
    """What went otherwise than planned. A wrong plan costs memory and speed, never correctness."""

    overflow_bytes: int = 0  # saved tensors that found no room in their slot and stayed on the device
    unplanned_slots: int = 0  # layer calls that found no rounding buffer and got memory of their own
    peak_host_bytes: int = 0
    offloaded_bytes: int = 0
    fetched_bytes: int = 0


@dataclass(slots=True)
class SlotMemory:
    """Rounding buffers, host arena and copy streams of one plan (MEMO section 4.1).

    Layer calls `i` and `i + 2` share a rounding buffer. Call `i + 2` takes it once the copy of call `i` to the host has
    ended; on the way back, call `i` is fetched into it when the backward of `i + 2` is over.

    Attributes:
        slot_bytes: Size of a slot.
        host_bytes: Host memory, gradients of keys and values included.
        device: Where layers run.
        whole_slots: Whether a slot's region on the host is as large as the slot, and taken at once; else as large as
            what was put into it, and taken when it leaves, all of it together.
        gradient_bytes: Host memory for gradients of keys and values.
    """

    slot_bytes: int
    host_bytes: int
    device: torch.device
    pinned: bool = True
    test_mode: TestMode | None = None
    whole_slots: bool = True
    gradient_bytes: int = 0
    stats: MemoryStats = field(default_factory=MemoryStats)
    arena: HostArena = field(init=False)
    gradient_arena: HostArena = field(init=False)
    _rooms: weakref.WeakSet[HostRoom] = field(init=False, default_factory=weakref.WeakSet)
    _buffers: list[Tensor] = field(init=False)
    _owners: list[Slot | None] = field(init=False)
    _offload: CopyStream = field(init=False)
    _prefetch: CopyStream = field(init=False)

    def __post_init__(self) -> None:
        delays: list[Delays | None] = [None, None]
        if self.test_mode is not None:
            seed, longest = self.test_mode.seed, self.test_mode.longest_delay_seconds
            delays = [Delays(seed, longest), Delays(seed + 1, longest)]
        pinned = self.pinned and self.device.type == "cuda"
        self.arena = HostArena(self.host_bytes - self.gradient_bytes, pinned)
        # Gradients are born while slots are given back: in an arena of their own they find no gaps that are too small.
        self.gradient_arena = HostArena(self.gradient_bytes, pinned)
        self._buffers = [torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._owners = [None, None]
        self._offload = make_copy_stream(self.device, "offload", delays[0])
        self._prefetch = make_copy_stream(self.device, "prefetch", delays[1])

    @property
    def slots_in_use(self) -> int:
        """Host slots and rounding buffers that some layer call holds."""
        regions = self.arena.regions_in_use + self.gradient_arena.regions_in_use
        return regions + sum(owner is not None for owner in self._owners)

    def lease(self, call: int, swap: bool) -> Slot:
        """A slot to write into, for layer call `call`; `swap`: it is going to leave for the host."""
        slot = Slot(self.slot_bytes, None, swap)
        self._take_buffer(slot, call)
        if swap and self.whole_slots:
            self._take_host(slot, self.slot_bytes)
        return slot

    def offload(self, slot: Slot) -> None:
        """Start copying what was written since the last call to the host."""
        start, stop = slot.copied_bytes, slot.used_bytes
        if slot.swap and not self.whole_slots and slot.host is None:
            self._take_host(slot, stop)
        if slot.host is None or start == stop:
            return
        assert slot.buffer is not None
        slot.offload = self._offload.copy(slot.host[start:stop], slot.buffer[start:stop])
        slot.copied_bytes = stop
        self.stats.offloaded_bytes += stop - start

    def fetch(self, slot: Slot, call: int, ahead: bool = False) -> None:
        """Start bringing a slot back to the device, if it is not there; `ahead` of need, only if its buffer is free."""
        if slot.buffer is not None or slot.released or (ahead and self._owners[call % 2] is not None):
            return
        self._take_buffer(slot, call)
        assert slot.host is not None and slot.buffer is not None
        stop = slot.copied_bytes
        slot.fetch = slot.last_fetch = self._prefetch.copy(slot.buffer[:stop], slot.host[:stop], slot.offload)
        self.stats.fetched_bytes += stop

    def release(self, slot: Slot) -> None:
        """Give back what a slot holds. A copy under way is waited for first."""
        if slot.released:
            return
        slot.released = True
        for event in (slot.offload, slot.fetch):
            if event is not None:
                event.wait()
        self._leave_buffer(slot)
        if slot.host is not None:
            if self.test_mode is not None:
                for event in (slot.offload, slot.last_fetch):
                    if event is not None:
                        event.synchronize()  # the poison is written by the CPU at once
                slot.host.fill_(POISON)
            self.arena.release(slot.host)
            slot.host = None

    def take_room(self, size_bytes: int, gradients: bool = False) -> HostRoom:
        """Memory for what is not in slots: on the host, or on the device if there is no room.

        Args:
            size_bytes: How much.
            gradients: Whether it is for gradients of keys and values.
        """
        arena = self.gradient_arena if gradients else self.arena
        region = arena.acquire(size_bytes)
        if region is None:
            self.stats.overflow_bytes += size_bytes
            return HostRoom(torch.empty(size_bytes, dtype=torch.uint8, device=self.device), None, False)
        self._note_peak()
        room = HostRoom(region, arena, poison=self.test_mode is not None)
        self._rooms.add(room)
        return room

    def abandon(self) -> None:
        """An interrupted step is over: end its copies, and take back all rooms."""
        self._offload.synchronize()
        self._prefetch.synchronize()
        for room in list(self._rooms):
            room.release()

    def write_host(self, room: HostRoom, start: int, source: Tensor) -> CopyEvent:
        """Start copying bytes of the device to a place in a room."""
        self.stats.offloaded_bytes += source.nbytes
        event = self._offload.copy(room.memory[start : start + source.nbytes], source)
        room.copies.write = event
        return event

    def read_host(self, destination: Tensor, room: HostRoom) -> CopyEvent:
        """Start copying the first bytes of a room to the device."""
        self.stats.fetched_bytes += destination.nbytes
        event = self._prefetch.copy(destination, room.memory[: destination.nbytes], room.copies.write)
        room.copies.read = event
        return event

    def reader(self, buffers: int) -> BlockReader:
        """Device buffers through which blocks of the host pass."""
        return BlockReader(self.device, self._prefetch, buffers, poison=self.test_mode is not None)

    def close(self) -> None:
        """Stop the copy streams and give the memory back."""
        self._offload.close()
        self._prefetch.close()
        self.arena.close()
        self.gradient_arena.close()

    def _take_host(self, slot: Slot, size_bytes: int) -> None:
        slot.host = self.arena.acquire(size_bytes)
        self._note_peak()

    def _note_peak(self) -> None:
        in_use = self.arena.bytes_in_use + self.gradient_arena.bytes_in_use
        self.stats.peak_host_bytes = max(self.stats.peak_host_bytes, in_use)

    def _take_buffer(self, slot: Slot, call: int) -> None:
        number = call % 2
        owner = self._owners[number]
        if owner is not None and not self._evict(owner):
            self.stats.unplanned_slots += 1
            slot.buffer = torch.empty(slot.capacity_bytes, dtype=torch.uint8, device=self.device)
            return
        self._owners[number] = slot
        slot.buffer, slot.rounding = self._buffers[number], number

    def _evict(self, slot: Slot) -> bool:
        """Make a slot leave its buffer; it can if all of it is on the host, or on its way there."""
        if slot.host is None or slot.in_backward or slot.copied_bytes < slot.used_bytes or slot.fetch is not None:
            return False
        if slot.offload is not None:
            slot.offload.wait()
        self._leave_buffer(slot)
        return True

    def _leave_buffer(self, slot: Slot) -> None:
        if self.test_mode is not None and slot.buffer is not None:
            slot.buffer.fill_(POISON)
        if slot.rounding is not None:
            self._owners[slot.rounding] = None
        slot.buffer = slot.rounding = None
