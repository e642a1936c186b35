"""A slot: the buffers that hold the saved tensors of one layer call, and the position of each tensor in them.

Note: [Slots, buffers and ranges]
These words are used in the same way throughout the engine.

- A *slot* belongs to one layer call. Its bytes are in a device buffer, in a host buffer, in the spill file, or in two
  of them while a copy is under way.
- A *buffer* is a uint8 tensor: one of the two *rounding buffers* on the device (MEMO section 4.1), or a *host buffer*,
  which is cut from a `HostArena`.
- A *share* is the part of a slot that is copied to one destination: the *host share* and the *disk share*.
- A `SlotView` is the position of one saved tensor in its slot; a `HostRange` is a range of bytes on the host that
  attention reads block by block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_memo.artifacts.slot_layouts import compressed_bytes
from lightning_memo.engine.copy_streams import CopyEvent
from lightning_memo.engine.memory.compressed_values import CompressedValues
from lightning_memo.engine.memory.host_arena import LastCopies
from lightning_memo.engine.memory.saved_storages import flat, gapless_strides, is_dense
from lightning_memo.engine.memory.spill import SpillWrite
from lightning_memo.engine.timeline_recorder import NOBODY, Subject
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
    write: SpillWrite | None = None
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
