"""Memory of swapped activations: host arena, spill file, two rounding buffers, and slots that move between them."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_memo.artifacts.spill_layout import BLOCK_BYTES, whole_blocks
from lightning_memo.engine.copies.copy_events import AllOf, CopyError, CopyEvent
from lightning_memo.engine.copies.copy_streams import CopyStream, make_copy_stream
from lightning_memo.engine.copies.step_recorder import StepRecorder
from lightning_memo.engine.copies.test_mode import TestMode, delays_of
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.host_arena import HostArena, HostRoom
from lightning_memo.engine.memory.saved_storages import POISON
from lightning_memo.engine.memory.slot import Part, Slot
from lightning_memo.engine.memory.spill import Spill, SpillWrite
from lightning_memo.engine.memory.spill_file import SpillError


@dataclass(slots=True)
class MemoryStats:
    """What went otherwise than planned. A wrong plan costs memory and speed, never correctness."""

    overflow_bytes: int = 0  # saved tensors that found no room in their slot and stayed on the device
    unplanned_slots: int = 0  # layer calls that found no rounding buffer and got memory of their own
    peak_host_bytes: int = 0
    offloaded_bytes: int = 0
    fetched_bytes: int = 0
    spilled_bytes: int = 0  # written to the disk, in whole blocks
    unspilled_bytes: int = 0  # and read again


@dataclass(slots=True)
class SlotMemory:
    """Rounding buffers, host arena and copy streams of one plan (MEMO section 4.1).

    Layer calls `i` and `i + 2` share a rounding buffer. Call `i + 2` takes it once the copy of call `i` to the host has
    ended; on the way back, call `i` is fetched into it when the backward of `i + 2` is over.

    Attributes:
        slot_bytes: Size of a slot.
        host_bytes: Host memory, gradients of keys and values and hidden states included.
        device: Where layers run.
        whole_slots: Whether a slot's region on the host is as large as the slot, and taken at once; else as large as
            what was put into it, and taken when it leaves, all of it together.
        gradient_bytes: Host memory for gradients of keys and values.
        state_bytes: Host memory for hidden states between layers, and their gradients.
        spill: The file for what does not go to the host; its bounce buffers are part of `host_bytes`.
        recorder: Told of copies, and of waits for them.
        check_restored: Whether what comes back is compared with what left: see `checked.py`.
    """

    slot_bytes: int
    host_bytes: int
    device: torch.device
    test_mode: TestMode | None = None
    whole_slots: bool = True
    gradient_bytes: int = 0
    spill: Spill | None = None
    state_bytes: int = 0
    recorder: StepRecorder | None = None
    check_restored: bool = False
    stats: MemoryStats = field(default_factory=MemoryStats)
    arena: HostArena = field(init=False)
    gradient_arena: HostArena = field(init=False)
    state_arena: HostArena = field(init=False)
    _rooms: weakref.WeakSet[HostRoom] = field(init=False, default_factory=weakref.WeakSet)
    _buffers: list[Tensor] = field(init=False)
    _owners: list[Slot | None] = field(init=False)
    _offload: CopyStream = field(init=False)
    _prefetch: CopyStream = field(init=False)

    def __post_init__(self) -> None:
        pinned = self.device.type == "cuda"
        self.arena = HostArena(self.host_bytes - self.gradient_bytes - self.state_bytes - self._bounce_bytes, pinned)
        # Gradients are born while slots are given back: in an arena of their own they find no gaps that are too small.
        self.gradient_arena = HostArena(self.gradient_bytes, pinned)
        self.state_arena = HostArena(self.state_bytes, pinned)
        self._buffers = [torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._owners = [None, None]
        self._offload = make_copy_stream(self.device, "offload", delays_of(self.test_mode, 0), self.recorder)
        self._prefetch = make_copy_stream(self.device, "prefetch", delays_of(self.test_mode, 1), self.recorder)

    @property
    def _bounce_bytes(self) -> int:
        return 0 if self.spill is None else self.spill.sizes.bounce_bytes

    @property
    def slots_in_use(self) -> int:
        """Regions of the host and of the spill file, and rounding buffers, that some layer call holds."""
        regions = sum(arena.regions_in_use for arena in self._arenas)
        regions += 0 if self.spill is None else len(self.spill.file.space)
        return regions + sum(owner is not None for owner in self._owners)

    @property
    def _arenas(self) -> tuple[HostArena, ...]:
        return self.arena, self.gradient_arena, self.state_arena

    def lease(self, call: int, swap: bool, spill_bytes: int = 0) -> Slot:
        """A slot to write into.

        Args:
            call: The layer call that it is for.
            swap: Whether it is going to leave the device.
            spill_bytes: How much of it goes to the disk.
        """
        split = self.slot_bytes - spill_bytes
        slot = Slot(None, Part(0, split), Part(split, self.slot_bytes), swap)
        if self.recorder is not None:
            slot.subject = self.recorder.subject
        self._take_buffer(slot, call)
        if swap and self.whole_slots and split:
            self._take_host(slot, split)
        if swap and spill_bytes and self.spill is not None:
            slot.disk = self.spill.take(spill_bytes)
        return slot

    def offload(self, slot: Slot, last: bool = False) -> None:
        """Start moving what was written since the last call to where it goes.

        Args:
            slot: It.
            last: Nothing more is going to be written. The disk gets whole blocks only, until then.
        """
        self._offload_to_host(slot)
        if slot.disk is not None and self.spill is not None:
            self._offload_to_disk(slot, slot.disk, self.spill, last)

    def _offload_to_host(self, slot: Slot) -> None:
        part = slot.to_host
        start, stop = part.copied_bytes, part.used_bytes
        if start == stop:
            return
        if slot.swap and not self.whole_slots and slot.host is None:
            self._take_host(slot, stop)
        if slot.host is None:
            return
        assert slot.buffer is not None
        part.offload = self._offload.copy(slot.host[start:stop], part.of(slot.buffer, start, stop))
        part.copied_bytes = stop
        self.stats.offloaded_bytes += stop - start

    def _offload_to_disk(self, slot: Slot, disk: range, spill: Spill, last: bool) -> None:
        part = slot.to_disk
        start = part.copied_bytes
        stop = part.used_bytes if last else part.used_bytes // BLOCK_BYTES * BLOCK_BYTES
        if start == stop:
            return
        assert slot.buffer is not None
        write = spill.write(part.of(slot.buffer, start, stop), disk.start + start, slot.subject)
        slot.writes.append(write)
        part.offload, part.copied_bytes = write.left, stop
        self.stats.spilled_bytes += whole_blocks(stop - start)

    def fetch(self, slot: Slot, call: int, ahead: bool = False) -> None:
        """Start bringing a slot back to the device, if it is not there; `ahead` of need, only if its buffer is free."""
        if slot.buffer is not None or slot.released or (ahead and self._owners[call % 2] is not None):
            return
        self._take_buffer(slot, call)
        assert slot.buffer is not None
        arrivals = []
        if stop := slot.to_host.copied_bytes:
            assert slot.host is not None
            arrivals.append(
                self._prefetch.copy(slot.buffer[:stop], slot.host[:stop], slot.to_host.offload, subject=slot.subject)
            )
            self.stats.fetched_bytes += stop
        if stop := slot.to_disk.copied_bytes:
            assert slot.disk is not None and self.spill is not None
            target = slot.to_disk.of(slot.buffer, 0, stop)
            arrivals.append(self.spill.read(target, slot.disk.start, slot.writes, slot.subject))
            self.stats.unspilled_bytes += whole_blocks(stop)
        slot.fetch = slot.last_fetch = AllOf(arrivals)

    def release(self, slot: Slot) -> None:
        """Give back what a slot holds. A copy under way is waited for first."""
        if slot.released:
            return
        slot.released = True
        for event in (slot.to_host.offload, slot.to_disk.offload, slot.fetch):
            _end(event)
        for write in slot.writes:
            _end(write)
        self._leave_buffer(slot)
        if slot.host is not None:
            if self.test_mode is not None:
                for event in (slot.to_host.offload, slot.last_fetch):
                    _end(event, for_cpu=True)  # the poison is written by the CPU at once
                slot.host.fill_(POISON)
            self.arena.release(slot.host)
            slot.host = None
        if slot.disk is not None and self.spill is not None:
            self.spill.give_back(slot.disk)
            slot.disk = None

    def take_room(self, size_bytes: int, arena: HostArena | None = None) -> HostRoom:
        """Memory for what is not in slots: on the host, or on the device if there is no room.

        Args:
            size_bytes: How much.
            arena: Where; `None` is where slots are.
        """
        arena = self.arena if arena is None else arena
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
        for stream in (self._offload, self._prefetch):
            with contextlib.suppress(CopyError):  # told where the bytes were needed
                stream.synchronize()
        if self.spill is not None:
            self.spill.synchronize()
        for room in list(self._rooms):
            room.release()

    def write_host(self, room: HostRoom, start: int, source: Tensor) -> CopyEvent:
        """Start copying bytes of the device to a place in a room."""
        self.stats.offloaded_bytes += source.nbytes
        event = self._offload.copy(room.memory[start : start + source.nbytes], source)
        room.copies.write = event
        return event

    def read_host(self, destination: Tensor, room: HostRoom, start: int = 0) -> CopyEvent:
        """Start copying bytes of a room, from `start` on, to the device."""
        self.stats.fetched_bytes += destination.nbytes
        source = room.memory[start : start + destination.nbytes]
        event = self._prefetch.copy(destination, source, room.copies.write)
        room.copies.read = event
        return event

    def reader(self, buffers: int, size_bytes: int) -> BlockReader:
        """Device buffers through which blocks of the host pass, of `size_bytes` together."""
        return BlockReader(self.device, self._prefetch, buffers, self.test_mode is not None, size_bytes)

    def close(self) -> None:
        """Stop the copy streams and give the memory and the file back."""
        if self.spill is not None:
            self.spill.close()
        self._offload.close()
        self._prefetch.close()
        for arena in self._arenas:
            arena.close()

    def _take_host(self, slot: Slot, size_bytes: int) -> None:
        slot.host = self.arena.acquire(size_bytes)
        self._note_peak()

    def _note_peak(self) -> None:
        in_use = sum(arena.bytes_in_use for arena in self._arenas) + self._bounce_bytes
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
        """Make a slot leave its buffer, if it can."""
        if not slot.can_leave:
            return False
        for part in (slot.to_host, slot.to_disk):
            if part.offload is not None:
                part.offload.wait()
        self._leave_buffer(slot)
        return True

    def _leave_buffer(self, slot: Slot) -> None:
        if self.test_mode is not None and slot.buffer is not None:
            slot.buffer.fill_(POISON)
        if slot.rounding is not None:
            self._owners[slot.rounding] = None
        slot.buffer = slot.rounding = None


def _end(event: CopyEvent | SpillWrite | None, for_cpu: bool = False) -> None:
    """Wait for the end of a copy. One that failed has told so where the bytes were needed."""
    with contextlib.suppress(SpillError, CopyError):
        if isinstance(event, SpillWrite) or (event is not None and for_cpu):
            event.synchronize()
        elif event is not None:
            event.wait()
