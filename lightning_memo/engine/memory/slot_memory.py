"""Memory of one plan for offloaded activations: slots, rounding buffers, places outside of the device, copy streams.

Note: [Slots, buffers and ranges]
These words are used in the same way throughout the engine.

- A *slot* belongs to one layer call, or to one slice of it where every slice has its own. Its bytes are in a device
  buffer, in a place outside of the device, or in both while a copy is under way.
- A *place* is where tensors wait for the backward: the device, the host or the disk (`places.py`).
- A *share* is the part of a slot that goes to one place. Its bytes are copied to a `Room` in that place.
- A *buffer* is a uint8 tensor: one of the two *rounding buffers* on the device (MEMO section 4.1), or a *host buffer*,
  which is cut from a `HostArena`.
- A `SlotView` is the position of one saved tensor in its slot; a `HostRange` is a range of bytes on the host that
  attention reads block by block.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_memo.artifacts.costs import Place
from lightning_memo.engine.copy_streams import AllOf, CopyError, CopyEvent, TestMode, delays_of, make_copy_stream
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.host import HostBuffer, HostRange, HostStore
from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.engine.memory.places import Room, Store
from lightning_memo.engine.memory.saved_storages import POISON, flat, gapless_strides, is_dense
from lightning_memo.engine.timeline_recorder import NOBODY, Subject, TimelineRecorder
from lightning_memo.planner.token_slices import aligned


@dataclass(frozen=True, slots=True)
class SlotView:
    """The position of a tensor in a slot, with its dtype, shape and strides.

    Attributes:
        offset_bytes: Start of the tensor's bytes in the slot.
        size_bytes: Number of bytes.
        dtype: Data type of the tensor.
        shape: Shape of the tensor.
        stride: Strides of the tensor, in elements.
        shift_bytes: Distance from `offset_bytes` to the tensor's first element.
        compact: Whether the tensor had gaps and was copied without them.
    """

    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shift_bytes: int = 0
    compact: bool = False

    def view_like(self, t: Tensor, shift_bytes: int) -> SlotView:
        """Return a view of the same bytes with the dtype, shape and strides of `t`, which lies inside them."""
        if self.compact:
            return self
        return replace(self, dtype=t.dtype, shape=tuple(t.shape), stride=t.stride(), shift_bytes=shift_bytes)


@dataclass(slots=True)
class SlotShare:
    """The bytes `[start, stop)` of a slot, which all go to the same place and are filled from the start.

    Attributes:
        start: First byte in the slot.
        stop: End of the share in the slot.
        used_bytes: Number of bytes that have been filled.
        copied_bytes: Number of filled bytes whose copy to the place has been started.
        room: Where the bytes go; `None` if they are on the device.
        left: End of the copies out of the device buffer.
    """

    start: int
    stop: int
    used_bytes: int = 0
    copied_bytes: int = 0
    room: Room | None = None
    left: CopyEvent | None = None

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    def take(self, size_bytes: int) -> int | None:
        """Reserve bytes and return their offset in the slot, or `None` if the share is too full."""
        start = self.start + self.used_bytes
        if start + size_bytes > self.stop:
            return None
        self.used_bytes = min(self.used_bytes + aligned(size_bytes), self.size_bytes)
        return start

    def write(self, buffer: Tensor, store: Store, subject: Subject) -> None:
        """Start copying the bytes from the slot's device buffer to a place, if there is room."""
        stop = self.used_bytes
        self.room = store.take(stop)
        if self.room is not None:
            self.left = self.room.write(buffer[self.start : self.start + stop], subject=subject)
            self.copied_bytes = stop

    def read(self, buffer: Tensor, subject: Subject) -> CopyEvent | None:
        """Start copying the bytes back to the slot's device buffer; returns the end of the copy, if there is any."""
        if self.room is None:
            return None
        return self.room.read(buffer[self.start : self.start + self.copied_bytes], subject=subject)


@dataclass(slots=True, eq=False)
class Slot:
    """The saved bytes of one layer call; see the note at the top of this file.

    Attributes:
        buffer: Device buffer, uint8; `None` while the bytes are elsewhere.
        shares: The shares of all places, in the order in which they lie in the device buffer.
        swap: Whether the slot leaves the device.
        rounding: Number of the rounding buffer that the slot occupies, if it occupies one.
        fetch: End of the copy back to the device, until the computation has waited for it.
        in_backward: Whether the layer call's backward is running.
        released: Whether the buffers have been given back.
        subject: The layer call, for the recorder.
    """

    buffer: Tensor | None
    shares: dict[Place, SlotShare]
    swap: bool = False
    rounding: int | None = None
    fetch: CopyEvent | None = None
    in_backward: bool = False
    released: bool = False
    subject: Subject = NOBODY

    @property
    def used_bytes(self) -> int:
        return sum(share.used_bytes for share in self.shares.values())

    @property
    def capacity_bytes(self) -> int:
        return sum(share.size_bytes for share in self.shares.values())

    @property
    def can_leave(self) -> bool:
        """Whether the device buffer can be reused: all copies out of it have been started and no backward needs it.

        A slot into which the plan puts nothing can leave too.
        """
        gone = all(share.copied_bytes == share.used_bytes for share in self.shares.values())
        return gone and not self.in_backward and self.fetch is None

    def wait_for_offload(self) -> None:
        """Make the computation wait until all bytes have been copied out of the device buffer."""
        for share in self.shares.values():
            if share.left is not None:
                share.left.wait()

    def put(self, t: Tensor, place: Place = "host") -> SlotView | None:
        """Copy `t` into the slot, without its gaps if it has any.

        Args:
            t: A tensor on the device.
            place: Where the tensor goes.

        Returns:
            The tensor's position, or `None` if the share is too full.
        """
        assert self.buffer is not None
        start = self.shares[place].take(t.nbytes)
        if start is None:
            return None
        target, dense = self.buffer[start : start + t.nbytes].view(t.dtype), is_dense(t)
        strides = t.stride() if dense else gapless_strides(t.shape, t)
        if dense:
            target.copy_(flat(t))
        else:
            torch.as_strided(target, t.shape, strides, target.storage_offset()).copy_(t)
        return SlotView(start, t.nbytes, t.dtype, tuple(t.shape), strides, compact=not dense)

    def load(self, view: SlotView) -> Tensor:
        """Return the tensor of a view; the computation waits until its bytes are on the device.

        Raises:
            RuntimeError: The slot has been released.
        """
        if self.released:
            raise RuntimeError(
                "the saved activations of this forward are gone: another batch was profiled since, or the step was "
                "abandoned: run the forward again"
            )
        if self.fetch is not None:
            self.fetch.wait()
            self.fetch = None
        assert self.buffer is not None
        first = view.offset_bytes
        data = self.buffer[first : first + view.size_bytes].view(view.dtype)
        shift = data.storage_offset() + view.shift_bytes // view.dtype.itemsize
        return torch.as_strided(data, view.shape, view.stride, shift)

    def host_range(self, view: SlotView) -> HostRange:
        """Return where the bytes of a view are after they have left the device, or on the device if they stay there."""
        share = self.shares["host"]
        if isinstance(share.room, HostBuffer):
            return share.room.range(view.offset_bytes - share.start, view.size_bytes)
        assert self.buffer is not None
        return HostRange(view.size_bytes, self.buffer[view.offset_bytes : view.offset_bytes + view.size_bytes])


class RoundingBuffers:
    """Two device buffers; layer calls `i` and `i + 2` share one.

    Args:
        size_bytes: Size of each buffer.
        device: Where the layers run.
        poison: Whether a buffer is filled with NaN when a slot leaves it.
    """

    def __init__(self, size_bytes: int, device: torch.device, poison: bool) -> None:
        self._device, self._poison = device, poison
        self._buffers: list[Tensor] = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._owners: list[Slot | None] = [None, None]

    @property
    def in_use(self) -> int:
        """Number of buffers that a slot occupies."""
        return sum(owner is not None for owner in self._owners)

    def buffer_owner(self, t: Tensor) -> Slot | Tensor | None:
        """The slot in whose buffer a tensor lies, or the buffer if no slot occupies it; `None` outside of buffers."""
        storage = t.untyped_storage().data_ptr()
        for buffer, owner in zip(self._buffers, self._owners, strict=True):
            if buffer.untyped_storage().data_ptr() == storage:
                return buffer if owner is None else owner
        return None

    def is_free(self, call: int) -> bool:
        """Whether no slot occupies the buffer of a layer call."""
        return self._owners[call % 2] is None

    def enter(self, slot: Slot, call: int) -> bool:
        """Give a slot the rounding buffer of its layer call, once the slot that occupies it can leave.

        Returns:
            Whether the slot got the rounding buffer; otherwise it got newly allocated memory.
        """
        number = call % 2
        owner = self._owners[number]
        if owner is not None:
            if not owner.can_leave:
                slot.buffer = torch.empty(slot.capacity_bytes, dtype=torch.uint8, device=self._device)
                return False
            owner.wait_for_offload()
            self.leave(owner)
        self._owners[number] = slot
        slot.buffer, slot.rounding = self._buffers[number], number
        return True

    def leave(self, slot: Slot) -> None:
        """Take the device buffer from a slot."""
        if self._poison and slot.buffer is not None:
            slot.buffer.fill_(POISON)
        if slot.rounding is not None:
            self._owners[slot.rounding] = None
        slot.buffer = slot.rounding = None


@dataclass(slots=True)
class MemoryStats:
    """Counters of a plan's execution. A wrong plan costs memory and speed, never correctness.

    Attributes:
        overflow_bytes: Bytes of saved tensors that did not fit in their slot and stayed on the device.
        unplanned_slots: Layer calls whose rounding buffer was occupied, for which memory was allocated instead.
        peak_host_bytes: Largest number of host bytes in use.
    """

    overflow_bytes: int = 0
    unplanned_slots: int = 0
    peak_host_bytes: int = 0


class SlotMemory:
    """Rounding buffers, places outside of the device and copy streams of one plan (MEMO section 4.1).

    Layer calls `i` and `i + 2` share a rounding buffer. Call `i + 2` takes it once the copy of call `i` to the host has
    ended. In the backward, call `i` is fetched into it when the backward of call `i + 2` is over.

    Args:
        slot_bytes: Size of the largest slot.
        host_bytes: Host memory of the plan, including `gradient_bytes`, `state_bytes` and what other places take.
        pages: Host memory, the first bytes of which are used.
        test_mode: Random delays and poisoned buffers that reveal copy races.
        gradient_bytes: Host memory for gradients of keys and values.
        state_bytes: Host memory for hidden states between layers, and for their gradients.
        recorder: Records copies and the computation's waits for them.
        device_bytes: Memory of the device that stands in for host memory, for slots that the host has no space for.
        others: The places besides the host.
        ahead_bytes: Host memory that is locked ahead, for a later plan.

    Attributes:
        stats: Counters of the execution.
        host: Host memory of the slots.
        gradients: Host memory of the gradients of keys and values.
        states: Host memory of the hidden states.
        stores: The places to which shares of slots go.
    """

    def __init__(
        self,
        slot_bytes: int,
        host_bytes: int,
        pages: HostPages,
        test_mode: TestMode | None = None,
        *,
        gradient_bytes: int = 0,
        state_bytes: int = 0,
        recorder: TimelineRecorder | None = None,
        device_bytes: int = 0,
        others: Mapping[Place, Store] | None = None,
        ahead_bytes: int = 0,
    ) -> None:
        self.slot_bytes, self.host_bytes, self.device_bytes = slot_bytes, host_bytes, device_bytes
        self.device = device = pages.device
        self.stats = MemoryStats()
        self._recorder, self._poison, others = recorder, test_mode is not None, others or {}
        self._rounding = RoundingBuffers(slot_bytes, device, self._poison)
        self._offload = make_copy_stream(device, "offload", delays_of(test_mode, 0), recorder)
        self._prefetch = make_copy_stream(device, "prefetch", delays_of(test_mode, 1), recorder)
        stores_bytes = host_bytes - sum(store.host_bytes for store in others.values())
        pages.hold(stores_bytes, ahead_bytes)
        bounds = [0, stores_bytes - gradient_bytes - state_bytes, stores_bytes - state_bytes, stores_bytes]
        slots, gradients, states = (range(*bound) for bound in itertools.pairwise(bounds))
        self.host = HostStore(pages, slots, self._offload, self._prefetch, self._poison, device_bytes)
        # Gradients are allocated while slots are released. A store of their own keeps them from finding only gaps that
        # are too small.
        self.gradients = HostStore(pages, gradients, self._offload, self._prefetch, self._poison)
        self.states = HostStore(pages, states, self._offload, self._prefetch, self._poison)
        self.stores: dict[Place, Store] = {"host": self.host, **others}
        self._all_stores = (*self.stores.values(), self.gradients, self.states)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied from the device to other places so far."""
        return sum(store.written_bytes for store in self._all_stores)

    @property
    def fetched_bytes(self) -> int:
        """Bytes copied back to the device so far, apart from the blocks that attention reads."""
        return sum(store.read_bytes for store in self._all_stores)

    @property
    def slots_in_use(self) -> int:
        """Number of rooms in other places and of rounding buffers in use."""
        return sum(store.rooms for store in self._all_stores) + self._rounding.in_use

    def buffer_owner(self, t: Tensor) -> Slot | Tensor | None:
        """What occupies the rounding buffer in which a tensor lies; `None` outside of these."""
        return self._rounding.buffer_owner(t)

    def lease(self, call: int, swap: bool, sizes: Mapping[Place, int] | None = None) -> Slot:
        """Return a slot with a device buffer that the forward can write into.

        Args:
            call: Number of the layer call.
            swap: Whether the slot leaves the device.
            sizes: Bytes of the slot that go to places other than the host, to which the others go.
        """
        sizes, shares, start = sizes or {}, dict[Place, SlotShare](), 0
        sizes = {"host": self.slot_bytes - sum(sizes.values()), **sizes}
        for place, size_bytes in sizes.items():
            shares[place] = SlotShare(start, start + size_bytes)
            start += size_bytes
        slot = Slot(None, shares, swap)
        if self._recorder is not None:
            slot.subject = self._recorder.subject
        self._enter_device(slot, call)
        return slot

    def wait_for_host(self) -> None:
        """Wait until the host memory of one more slot is locked."""
        room = self.host.take(self.slot_bytes)
        if room is not None:
            room.release()

    def offload(self, slot: Slot) -> None:
        """Start copying the bytes of a slot, into which nothing more is put, to the places of its shares."""
        for place, share in slot.shares.items():
            if share.used_bytes and slot.swap:
                assert slot.buffer is not None
                share.write(slot.buffer, self.stores[place], slot.subject)
                self._note_peak()

    def fetch(self, slot: Slot, call: int, ahead: bool = False) -> None:
        """Start copying a slot back to the device, unless it is there.

        Args:
            slot: The slot.
            call: Number of its layer call.
            ahead: Whether the slot is not needed yet; it is then fetched only if its rounding buffer is free.
        """
        if slot.buffer is not None or slot.released or (ahead and not self._rounding.is_free(call)):
            return
        self._enter_device(slot, call)
        assert slot.buffer is not None
        arrivals = [share.read(slot.buffer, slot.subject) for share in slot.shares.values()]
        slot.fetch = AllOf([arrival for arrival in arrivals if arrival is not None])

    def rest(self, slot: Slot) -> None:
        """End the use of a slot by a backward that another one may follow: its device buffer can be reused."""
        if slot.fetch is not None:
            with contextlib.suppress(OSError, CopyError):  # was raised where the bytes were needed
                slot.fetch.wait()
        slot.fetch, slot.in_backward = None, False
        if slot.rounding is None and slot.can_leave:
            slot.buffer = None

    def release(self, slot: Slot) -> None:
        """Give back a slot's buffers, after waiting for the copies that are under way."""
        if slot.released:
            return
        slot.released = True
        for share in slot.shares.values():
            if share.room is not None:
                share.room.release()
                share.room = None
        self._rounding.leave(slot)

    def take_host_buffer(self, size_bytes: int, store: HostStore | None = None) -> HostBuffer:
        """Take a buffer outside of slots: on the host, or on the device if the host memory is too full.

        Args:
            size_bytes: Size of the buffer.
            store: The host memory to take it from; `None` is that of the slots.
        """
        store = store or self.host
        buffer = store.take(size_bytes)
        if buffer is None:
            self.stats.overflow_bytes += size_bytes
            return store.stand_in(size_bytes)
        self._note_peak()
        return buffer

    def abandon(self) -> None:
        """Clean up after an interrupted step: wait for its copies and release all host buffers."""
        for stream in (self._offload, self._prefetch):
            with contextlib.suppress(CopyError):  # was raised where the bytes were needed
                stream.synchronize()
        for store in self._all_stores:
            store.abandon()

    def reader(self, buffers: int, size_bytes: int) -> BlockReader:
        """Return a block reader with `buffers` device buffers of `size_bytes` in total."""
        return BlockReader(self.device, self._prefetch, buffers, self._poison, size_bytes)

    def close(self) -> None:
        """Stop the copy streams and free the memory of all places but the host."""
        self._offload.close()
        self._prefetch.close()
        for store in self._all_stores:
            store.close()

    def _enter_device(self, slot: Slot, call: int) -> None:
        if not self._rounding.enter(slot, call):
            self.stats.unplanned_slots += 1

    def _note_peak(self) -> None:
        in_use = sum(store.host_bytes_in_use for store in self._all_stores)
        self.stats.peak_host_bytes = max(self.stats.peak_host_bytes, in_use)
