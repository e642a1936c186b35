"""Memory of one plan for offloaded activations: slots, rounding buffers, host arenas, spill file and copy streams.

Note: [Slots, buffers and ranges]
These words are used in the same way throughout the engine.

- A *slot* belongs to one layer call, or to one slice of it where every slice has its own. Its bytes are in a device
  buffer, in a host buffer, in the spill file, or in two of them while a copy is under way.
- A *buffer* is a uint8 tensor: one of the two *rounding buffers* on the device (MEMO section 4.1), or a *host buffer*,
  which is cut from a `HostArena`.
- A *share* is the part of a slot that is copied to one destination: the *host share* and the *disk share*.
- A `SlotView` is the position of one saved tensor in its slot; a `HostRange` is a range of bytes on the host that
  attention reads block by block.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_memo.artifacts.slot_layouts import compressed_bytes, whole_blocks
from lightning_memo.engine.copy_streams import (
    AllOf,
    CopyError,
    CopyEvent,
    CopyStream,
    TestMode,
    delays_of,
    make_copy_stream,
)
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.compressed_values import CompressedValues
from lightning_memo.engine.memory.disk import DiskError, DiskStore, DiskWrite
from lightning_memo.engine.memory.host_arena import DeviceArena, HostArena, HostBuffer, LastCopies
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
        compressed: Number and data type of the values, if they are compressed; `None` if they are as they were.
    """

    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shift_bytes: int = 0
    compact: bool = False
    compressed: tuple[int, torch.dtype] | None = None

    def view_like(self, t: Tensor, shift_bytes: int) -> SlotView:
        """Return a view of the same bytes with the dtype, shape and strides of `t`, which lies inside them."""
        if self.compact:
            return self
        return replace(self, dtype=t.dtype, shape=tuple(t.shape), stride=t.stride(), shift_bytes=shift_bytes)


@dataclass(slots=True)
class SlotShare:
    """The bytes `[start, stop)` of a slot, which all go to the same destination and are filled from the start.

    Attributes:
        start: First byte in the slot.
        stop: End of the share in the slot.
        used_bytes: Number of bytes that have been filled.
        copied_bytes: Number of filled bytes whose copy to the destination has been started.
        offload: End of the last copy out of the device buffer.
        pieces: Ends of the copies to the host so far, each with the end of its bytes in the share.
    """

    start: int
    stop: int
    used_bytes: int = 0
    copied_bytes: int = 0
    offload: CopyEvent | None = None
    pieces: list[tuple[int, CopyEvent]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    def arrival(self, stop: int) -> CopyEvent | None:
        """Return the end of the copy after which the bytes up to `stop` are at the destination."""
        return next((event for end, event in self.pieces if end >= stop), self.offload)

    def take(self, size_bytes: int) -> int | None:
        """Reserve bytes and return their offset in the slot, or `None` if the share is too full."""
        start = self.start + self.used_bytes
        if start + size_bytes > self.stop:
            return None
        self.used_bytes = min(self.used_bytes + aligned(size_bytes), self.size_bytes)
        return start

    def of(self, buffer: Tensor, first: int, last: int) -> Tensor:
        """Return the bytes `[first, last)` of this share in the slot's device buffer."""
        return buffer[self.start + first : self.start + last]


@dataclass(slots=True, eq=False)
class Slot:
    """The saved bytes of one layer call; see the note at the top of this file.

    The host share lies at the front of the device buffer, and the disk share behind it.

    Attributes:
        buffer: Device buffer, uint8; `None` while the bytes are elsewhere.
        to_host: The host share.
        to_disk: The disk share.
        swap: Whether the slot leaves the device.
        rounding: Number of the rounding buffer that the slot occupies, if it occupies one.
        host: Host buffer, uint8.
        disk: Range of the spill file.
        write: Write of the disk share to the spill file.
        fetch: End of the copy back to the device, until the computation has waited for it.
        copies: The last copy from the host buffer.
        in_backward: Whether the layer call's backward is running.
        released: Whether the buffers have been given back.
        subject: The layer call, for the recorder.
    """

    buffer: Tensor | None
    to_host: SlotShare
    to_disk: SlotShare
    swap: bool = False
    rounding: int | None = None
    host: Tensor | None = None
    disk: range | None = None
    write: DiskWrite | None = None
    fetch: CopyEvent | None = None
    copies: LastCopies = field(default_factory=LastCopies)
    in_backward: bool = False
    released: bool = False
    subject: Subject = NOBODY

    @property
    def used_bytes(self) -> int:
        return self.to_host.used_bytes + self.to_disk.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.to_disk.stop

    @property
    def can_leave(self) -> bool:
        """Whether the device buffer can be reused: all copies out of it have been started and no backward needs it.

        A slot into which the plan puts nothing can leave too.
        """
        elsewhere = self.host is not None or self.disk is not None or self.used_bytes == 0
        gone = all(share.copied_bytes == share.used_bytes for share in (self.to_host, self.to_disk))
        return elsewhere and gone and not self.in_backward and self.fetch is None

    def wait_for_offload(self) -> None:
        """Make the computation wait until all bytes have been copied out of the device buffer."""
        for share in (self.to_host, self.to_disk):
            if share.offload is not None:
                share.offload.wait()

    def put(self, t: Tensor, spill: bool = False, compress: bool = False) -> SlotView | None:
        """Copy `t` into the slot, without its gaps if it has any.

        Args:
            t: A tensor on the device.
            spill: Whether the tensor goes to the disk instead of the host.
            compress: Whether it is compressed; see `compressed_values.py`.

        Returns:
            The tensor's position, or `None` if the share is too full.
        """
        assert self.buffer is not None
        size_bytes = compressed_bytes(t.numel(), t.itemsize) if compress else t.nbytes
        start = (self.to_disk if spill else self.to_host).take(size_bytes)
        if start is None:
            return None
        target, dense = self.buffer[start : start + size_bytes], is_dense(t)
        strides = t.stride() if dense else gapless_strides(t.shape, t)
        if compress:
            values = t if dense else torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
            CompressedValues(target, t.numel(), t.dtype).write(flat(values))
        elif dense:
            target.view(t.dtype).copy_(flat(t))
        else:
            target = target.view(t.dtype)
            torch.as_strided(target, t.shape, strides, target.storage_offset()).copy_(t)
        compressed = (t.numel(), t.dtype) if compress else None
        return SlotView(start, size_bytes, t.dtype, tuple(t.shape), strides, compact=not dense, compressed=compressed)

    def load(self, view: SlotView) -> Tensor:
        """Return the tensor of a view; the computation waits until its bytes are on the device.

        A compressed tensor is restored into memory of its own, each time it is loaded.

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
        data = self.buffer[first : first + view.size_bytes]
        if view.compressed is not None:
            data = CompressedValues(data, *view.compressed).read()
        data = data.view(view.dtype)
        shift = data.storage_offset() + view.shift_bytes // view.dtype.itemsize
        return torch.as_strided(data, view.shape, view.stride, shift)


PIECE_BYTES = 256 << 20
"""Longest copy to the host. Attention waits only for the piece that has its keys, and not for all that follow."""


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
        offloaded_bytes: Bytes copied from the device to host buffers.
        fetched_bytes: Bytes copied from host buffers to the device.
        spilled_bytes: Bytes written to the disk, in complete blocks.
        unspilled_bytes: Bytes read from the disk, in complete blocks.
    """

    overflow_bytes: int = 0
    unplanned_slots: int = 0
    peak_host_bytes: int = 0
    offloaded_bytes: int = 0
    fetched_bytes: int = 0
    spilled_bytes: int = 0
    unspilled_bytes: int = 0


@dataclass(slots=True)
class SlotMemory:
    """Rounding buffers, host arenas and copy streams of one plan (MEMO section 4.1).

    Layer calls `i` and `i + 2` share a rounding buffer. Call `i + 2` takes it once the copy of call `i` to the host has
    ended. In the backward, call `i` is fetched into it when the backward of call `i + 2` is over.

    Attributes:
        slot_bytes: Size of the largest slot.
        host_bytes: Host memory of the plan, including `gradient_bytes`, `state_bytes` and the spill's bounce buffers.
        device: Where the layers run.
        test_mode: Random delays and poisoned buffers that reveal copy races.
        gradient_bytes: Host memory for gradients of keys and values.
        spill: The spill file and its copy streams, if the plan spills.
        state_bytes: Host memory for hidden states between layers, and for their gradients.
        recorder: Records copies and the computation's waits for them.
        device_bytes: Memory of the device that stands in for host memory, for slots that the host has no space for.
        stats: Counters of the execution.
        arena: Host arena of the slots.
        gradient_arena: Host arena of the gradients of keys and values.
        state_arena: Host arena of the hidden states.
    """

    slot_bytes: int
    host_bytes: int
    device: torch.device
    test_mode: TestMode | None = None
    gradient_bytes: int = 0
    spill: DiskStore | None = None
    state_bytes: int = 0
    recorder: TimelineRecorder | None = None
    device_bytes: int = 0
    stats: MemoryStats = field(default_factory=MemoryStats)
    arena: HostArena = field(init=False)
    gradient_arena: HostArena = field(init=False)
    state_arena: HostArena = field(init=False)
    _host_buffers: weakref.WeakSet[HostBuffer] = field(init=False, default_factory=weakref.WeakSet)
    _rounding: RoundingBuffers = field(init=False)
    _offload: CopyStream = field(init=False)
    _prefetch: CopyStream = field(init=False)

    def __post_init__(self) -> None:
        pinned = self.device.type == "cuda"
        slots_bytes = self.host_bytes - self.gradient_bytes - self.state_bytes - self._bounce_bytes
        self.arena = HostArena(slots_bytes, pinned, DeviceArena(self.device_bytes, self.device))
        # Gradients are allocated while slots are released. An arena of their own keeps them from finding only gaps that
        # are too small.
        self.gradient_arena = HostArena(self.gradient_bytes, pinned)
        self.state_arena = HostArena(self.state_bytes, pinned)
        self._rounding = RoundingBuffers(self.slot_bytes, self.device, poison=self.test_mode is not None)
        self._offload = make_copy_stream(self.device, "offload", delays_of(self.test_mode, 0), self.recorder)
        self._prefetch = make_copy_stream(self.device, "prefetch", delays_of(self.test_mode, 1), self.recorder)

    @property
    def _bounce_bytes(self) -> int:
        return 0 if self.spill is None else self.spill.sizes.bounce_bytes

    @property
    def slots_in_use(self) -> int:
        """Number of host buffers, ranges of the spill file and rounding buffers in use."""
        count = sum(arena.buffers_in_use for arena in self._arenas)
        count += 0 if self.spill is None else len(self.spill.file.space)
        return count + self._rounding.in_use

    @property
    def _arenas(self) -> tuple[HostArena, ...]:
        return self.arena, self.gradient_arena, self.state_arena

    def buffer_owner(self, t: Tensor) -> Slot | Tensor | None:
        """What occupies the rounding buffer in which a tensor lies; `None` outside of these."""
        return self._rounding.buffer_owner(t)

    def lease(self, call: int, swap: bool, disk_bytes: int = 0) -> Slot:
        """Return a slot with a device buffer that the forward can write into.

        Args:
            call: Number of the layer call.
            swap: Whether the slot leaves the device.
            disk_bytes: Bytes of the slot that go to the disk; the others go to the host.
        """
        split = self.slot_bytes - disk_bytes
        slot = Slot(None, SlotShare(0, split), SlotShare(split, self.slot_bytes), swap)
        if self.recorder is not None:
            slot.subject = self.recorder.subject
        self._enter_device(slot, call)
        if swap and disk_bytes and self.spill is not None:
            slot.disk = self.spill.take(disk_bytes)
        return slot

    def offload(self, slot: Slot) -> None:
        """Start copying the bytes of a slot, into which nothing more is put, to the host and the disk."""
        self._offload_to_host(slot)
        if slot.disk is not None and self.spill is not None:
            self._offload_to_disk(slot, slot.disk, self.spill)

    def _offload_to_host(self, slot: Slot) -> None:
        share = slot.to_host
        stop = share.used_bytes
        if not stop or not slot.swap:
            return
        slot.host = self.arena.acquire(stop)
        self._note_peak()
        if slot.host is None:
            return
        assert slot.buffer is not None
        for first in range(0, stop, PIECE_BYTES):
            last = min(first + PIECE_BYTES, stop)
            share.offload = self._offload.copy(slot.host[first:last], share.of(slot.buffer, first, last))
            share.pieces.append((last, share.offload))
        share.copied_bytes = stop
        self.stats.offloaded_bytes += stop

    def _offload_to_disk(self, slot: Slot, disk: range, spill: DiskStore) -> None:
        share = slot.to_disk
        stop = share.used_bytes
        if not stop:
            return
        assert slot.buffer is not None
        slot.write = spill.write(share.of(slot.buffer, 0, stop), disk.start, slot.subject)
        share.offload, share.copied_bytes = slot.write.left, stop
        self.stats.spilled_bytes += whole_blocks(stop)

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
        arrivals = []
        if stop := slot.to_host.copied_bytes:
            assert slot.host is not None
            slot.copies.read = self._prefetch.copy(
                slot.buffer[:stop], slot.host[:stop], slot.to_host.offload, subject=slot.subject
            )
            arrivals.append(slot.copies.read)
            self.stats.fetched_bytes += stop
        if stop := slot.to_disk.copied_bytes:
            assert slot.disk is not None and self.spill is not None
            target = slot.to_disk.of(slot.buffer, 0, stop)
            arrivals.append(self.spill.read(target, slot.disk.start, slot.write, slot.subject))
            self.stats.unspilled_bytes += whole_blocks(stop)
        slot.fetch = AllOf(arrivals)

    def rest(self, slot: Slot) -> None:
        """End the use of a slot by a backward that another one may follow: its device buffer can be reused."""
        _end(slot.fetch)
        slot.fetch, slot.in_backward = None, False
        if slot.rounding is None and slot.can_leave:
            slot.buffer = None

    def release(self, slot: Slot) -> None:
        """Give back a slot's buffers, after waiting for the copies that are under way."""
        if slot.released:
            return
        slot.released = True
        for event in (slot.to_host.offload, slot.to_disk.offload, slot.fetch, slot.write):
            _end(event)
        self._rounding.leave(slot)
        if slot.host is not None:
            if self.test_mode is not None:
                for event in (slot.to_host.offload, slot.copies.read):
                    _end(event, for_cpu=True)  # the CPU writes the poison at once
                slot.host.fill_(POISON)
            self.arena.release(slot.host)
            slot.host = None
        if slot.disk is not None and self.spill is not None:
            self.spill.give_back(slot.disk)
            slot.disk = None

    def take_host_buffer(self, size_bytes: int, arena: HostArena | None = None) -> HostBuffer:
        """Acquire a buffer outside of slots: on the host, or on the device if the arena is too full.

        Args:
            size_bytes: Size of the buffer.
            arena: The host arena to take it from; `None` is the arena of the slots.
        """
        arena = self.arena if arena is None else arena
        memory = arena.acquire(size_bytes)
        if memory is None:
            self.stats.overflow_bytes += size_bytes
            memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
            buffer = HostBuffer(memory, None, False)
        else:
            self._note_peak()
            buffer = HostBuffer(memory, arena, poison=self.test_mode is not None)
        self._host_buffers.add(buffer)
        return buffer

    def abandon(self) -> None:
        """Clean up after an interrupted step: wait for its copies and release all host buffers outside of slots."""
        for stream in (self._offload, self._prefetch):
            with contextlib.suppress(CopyError):  # was raised where the bytes were needed
                stream.synchronize()
        if self.spill is not None:
            self.spill.synchronize()
        for buffer in list(self._host_buffers):
            buffer.release()

    def copy_to_host(self, buffer: HostBuffer, start: int, source: Tensor) -> CopyEvent:
        """Start copying the bytes of `source` from the device to a host buffer, from byte `start` on."""
        self.stats.offloaded_bytes += source.nbytes
        event = self._offload.copy(buffer.memory[start : start + source.nbytes], source)
        buffer.copies.write = event
        return event

    def copy_from_host(self, destination: Tensor, buffer: HostBuffer, start: int = 0) -> CopyEvent:
        """Start filling `destination` on the device with the bytes of a host buffer, from byte `start` on."""
        self.stats.fetched_bytes += destination.nbytes
        source = buffer.memory[start : start + destination.nbytes]
        event = self._prefetch.copy(destination, source, buffer.copies.write)
        buffer.copies.read = event
        return event

    def reader(self, buffers: int, size_bytes: int) -> BlockReader:
        """Return a block reader with `buffers` device buffers of `size_bytes` in total."""
        return BlockReader(self.device, self._prefetch, buffers, self.test_mode is not None, size_bytes)

    def close(self) -> None:
        """Stop the copy streams and free the memory and the spill file."""
        if self.spill is not None:
            self.spill.close()
        self._offload.close()
        self._prefetch.close()
        for buffer in list(self._host_buffers):  # what still refers to them must not read freed memory
            buffer.release()
        for arena in self._arenas:
            arena.close()

    def _enter_device(self, slot: Slot, call: int) -> None:
        if not self._rounding.enter(slot, call):
            self.stats.unplanned_slots += 1

    def _note_peak(self) -> None:
        in_use = sum(arena.bytes_in_use for arena in self._arenas) + self._bounce_bytes
        self.stats.peak_host_bytes = max(self.stats.peak_host_bytes, in_use)


def _end(event: CopyEvent | DiskWrite | None, for_cpu: bool = False) -> None:
    """Wait for the end of a copy. The error of a failed copy was raised where its bytes were needed."""
    with contextlib.suppress(DiskError, CopyError):
        if isinstance(event, DiskWrite) or (event is not None and for_cpu):
            event.synchronize()
        elif event is not None:
            event.wait()
