"""A slot: the saved bytes of one layer call, and what lies where in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memo.engine.copies import CopyEvent
from lightning_memo.engine.regions import aligned, flat, gapless_strides, is_dense


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
