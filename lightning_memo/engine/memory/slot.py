"""A slot: the saved bytes of one layer call, and what lies where in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyEvent
from lightning_memo.engine.copies.step_recorder import NOBODY, Subject
from lightning_memo.engine.memory.saved_storages import flat, gapless_strides, is_dense
from lightning_memo.engine.memory.spill import SpillWrite
from lightning_memo.planner.token_slices import aligned


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


@dataclass(slots=True)
class Part:
    """Bytes of a slot that go the same way: `[start, stop)` of its buffer, filled from the start.

    Attributes:
        used_bytes: Filled so far.
        copied_bytes: Of those, on their way or gone.
        offload: The end of the last copy out of the buffer.
    """

    start: int
    stop: int
    used_bytes: int = 0
    copied_bytes: int = 0
    offload: CopyEvent | None = None

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    def take(self, size_bytes: int) -> int | None:
        """Where in the buffer so many bytes can be written; `None` when there is no room."""
        start = self.start + self.used_bytes
        if start + size_bytes > self.stop:
            return None
        self.used_bytes = min(self.used_bytes + aligned(size_bytes), self.size_bytes)
        return start

    def of(self, buffer: Tensor, first: int, last: int) -> Tensor:
        """The part's bytes `[first, last)` in the slot's buffer."""
        return buffer[self.start + first : self.start + last]


@dataclass(slots=True, eq=False)
class Slot:
    """The saved bytes of one layer call: on the device, elsewhere, or on both while a copy is under way.

    What goes to the host lies in front in the buffer, what goes to the disk behind it.
    """

    buffer: Tensor | None  # uint8 on the device
    to_host: Part
    to_disk: Part
    swap: bool = False  # it is going to leave the device
    rounding: int | None = None  # which rounding buffer it holds, if any
    host: Tensor | None = None
    disk: range | None = None  # where in the spill file
    writes: list[SpillWrite] = field(default_factory=list)
    fetch: CopyEvent | None = None  # until it has been waited for
    last_fetch: CopyEvent | None = None
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
        """Whether all of it is elsewhere, or on its way there, and not needed here; a plan may put nothing into it."""
        elsewhere = self.host is not None or self.disk is not None or self.used_bytes == 0
        gone = all(part.copied_bytes == part.used_bytes for part in (self.to_host, self.to_disk))
        return elsewhere and gone and not self.in_backward and self.fetch is None

    def put(self, t: Tensor, spill: bool = False) -> Stored | None:
        """Copy `t` into the slot, compactly if it has gaps; `None` when there is no room.

        Args:
            t: A tensor of the device.
            spill: Whether it is to leave for the disk, rather than for the host.
        """
        assert self.buffer is not None
        start = (self.to_disk if spill else self.to_host).take(t.nbytes)
        if start is None:
            return None
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
