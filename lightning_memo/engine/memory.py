"""Memory of swapped activations: one host arena, two rounding buffers, and slots that move between them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_memo.engine.block_reader import BlockReader
from lightning_memo.engine.copies import CopyEvent, CopyStream, Delays, make_copy_stream
from lightning_memo.engine.regions import POISON, aligned, flat, gapless_strides, is_dense


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


class HostArena:
    """One allocation of exactly the planned size, cut into regions; page-locked in one piece when `pinned`.

    PyTorch's own pinned pool rounds every request up to a power of two; registering plain memory does not.

    Raises:
        MemoryError: The host refuses the allocation or the page lock.
    """

    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self._memory = torch.empty(self.size_bytes, dtype=torch.uint8, device="cpu")
        self._unpin = weakref.finalize(self, _unpin, self._memory) if pinned and self.size_bytes else None
        if self._unpin is not None:
            error = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self.size_bytes, 0)
            if error != torch.cuda.cudart().cudaError.success:
                self._unpin.detach()
                raise MemoryError(
                    f"page-locking {self.size_bytes} bytes of host memory failed ({error}): lower host_memory, "
                    "or raise the limit of locked memory (ulimit -l)"
                )
        self.bytes_in_use = 0
        self._taken: list[range] = []  # in the order of their places

    @property
    def regions_in_use(self) -> int:
        return len(self._taken)

    def acquire(self, size_bytes: int) -> Tensor | None:
        """A free region, uint8 `[size_bytes]`, or `None`."""
        stops = [0, *(taken.stop for taken in self._taken[-1:])]
        # What is taken first is given back last, so there is room at the end, or seldom between two regions.
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
        return self._memory[start : start + size_bytes]

    def release(self, region: Tensor) -> None:
        taken = range(region.storage_offset(), region.storage_offset() + region.nbytes)
        self.bytes_in_use -= region.nbytes
        if self._taken[-1] == taken:
            self._taken.pop()
        else:
            self._taken.remove(taken)

    def close(self) -> None:
        """Unlock the pages. No copy may be under way."""
        if self._unpin is not None:
            self._unpin()


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class HostRoom:
    """A region that is held by whoever needs it, and goes back when that is gone; copies are waited for first.

    Attributes:
        memory: The bytes, uint8.
        last_write: The last copy to it.
        last_read: The last copy from it.
    """

    def __init__(self, memory: Tensor, arena: HostArena | None, poison: bool) -> None:
        self.memory = memory
        self._copies: dict[str, CopyEvent] = {}
        self._release = weakref.finalize(self, _give_back, memory, arena, poison, self._copies)
        self._release.atexit = False

    @property
    def last_write(self) -> CopyEvent | None:
        return self._copies.get("write")

    @last_write.setter
    def last_write(self, event: CopyEvent) -> None:
        self._copies["write"] = event

    @property
    def last_read(self) -> CopyEvent | None:
        return self._copies.get("read")

    @last_read.setter
    def last_read(self, event: CopyEvent) -> None:
        self._copies["read"] = event

    def release(self) -> None:
        """Give the region back."""
        self._release()


def _give_back(memory: Tensor, arena: HostArena | None, poison: bool, copies: dict[str, CopyEvent]) -> None:
    for event in copies.values():
        event.wait()
        if poison:
            event.synchronize()  # the poison is written by the CPU at once
    if poison:
        memory.fill_(POISON)
    if arena is not None:
        arena.release(memory)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a slot: `[offset_bytes, offset_bytes + size_bytes)` seen with its dtype, shape and strides."""

    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shift_bytes: int = 0  # where the tensor begins in the region
    compact: bool = False  # the tensor had gaps, and was copied without them

    def view_like(self, t: Tensor, shift_bytes: int) -> Stored:
        """The same region seen as another tensor that lies in it."""
        if self.compact:
            return self
        return Stored(self.offset_bytes, self.size_bytes, t.dtype, tuple(t.shape), t.stride(), shift_bytes)


@dataclass(slots=True, eq=False)
class Slot:
    """The saved bytes of one layer call: on the device, on the host, or on both while a copy is under way."""

    capacity_bytes: int
    buffer: Tensor | None  # uint8 [capacity_bytes] on the device
    swap: bool = False  # it is going to leave for the host
    rounding: int | None = None  # which rounding buffer it holds, if any
    host: Tensor | None = None
    used_bytes: int = 0
    copied_bytes: int = 0
    offload: CopyEvent | None = None
    fetch: CopyEvent | None = None  # until it has been waited for
    last_fetch: CopyEvent | None = None
    in_backward: bool = False
    released: bool = False

    def put(self, t: Tensor) -> Stored | None:
        """Copy `t` into the slot, compactly if it has gaps; `None` when there is no room."""
        assert self.buffer is not None
        start = self.used_bytes
        if start + t.nbytes > self.capacity_bytes:
            return None
        self.used_bytes = min(start + aligned(t.nbytes), self.capacity_bytes)
        target = self.buffer[start : start + t.nbytes].view(t.dtype)
        if is_dense(t):
            target.copy_(flat(t))
            return Stored(start, t.nbytes, t.dtype, tuple(t.shape), t.stride())
        strides = gapless_strides(t.shape, t)
        torch.as_strided(target, t.shape, strides, target.storage_offset()).copy_(t)
        return Stored(start, t.nbytes, t.dtype, tuple(t.shape), strides, compact=True)

    def load(self, stored: Stored) -> Tensor:
        """The tensor, once its bytes are on the device."""
        if self.released:
            raise RuntimeError(
                "the saved activations of this forward are gone: a backward ran already (retain_graph and second "
                "derivatives are not supported) or the step was abandoned; run the forward again"
            )
        if self.fetch is not None:
            self.fetch.wait()
            self.fetch = None
        assert self.buffer is not None
        first = stored.offset_bytes
        region = self.buffer[first : first + stored.size_bytes].view(stored.dtype)
        shift = region.storage_offset() + stored.shift_bytes // stored.dtype.itemsize
        return torch.as_strided(region, stored.shape, stored.stride, shift)


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
        room.last_write = event
        return event

    def read_host(self, destination: Tensor, room: HostRoom) -> CopyEvent:
        """Start copying the first bytes of a room to the device."""
        self.stats.fetched_bytes += destination.nbytes
        event = self._prefetch.copy(destination, room.memory[: destination.nbytes], room.last_write)
        room.last_read = event
        return event

    def reader(self, buffers: int, size_bytes: int) -> BlockReader:
        """Device buffers through which blocks of the host pass, of `size_bytes` together."""
        return BlockReader(self.device, self._prefetch, buffers, self.test_mode is not None, size_bytes)

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
