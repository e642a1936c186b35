"""What a layer call keeps on the device by plan."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.engine.memory.saved_storages import Registry, flat, gapless_strides, is_dense


class KeptTensors:
    """Copies of what is kept, without gaps, each byte once.

    Copies, as of what is swapped: a layer may overwrite its input or the output of a matrix product, and a part of a
    tensor would keep all of it alive.

    Attributes:
        size_bytes: What was kept so far.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._registry: Registry[Tensor] = Registry()

    def put(self, t: Tensor) -> Tensor:
        """Keep a copy of a tensor."""
        if is_dense(t):
            copy = torch.as_strided(flat(t).clone(), t.shape, t.stride())
        else:
            copy = torch.empty_strided(t.shape, gapless_strides(t.shape, t), dtype=t.dtype, device=t.device).copy_(t)
        self.size_bytes += copy.nbytes
        self._registry.add(t, copy)
        return copy

    def find(self, t: Tensor) -> Tensor | None:
        """The copy of a tensor whose bytes are kept already."""
        known = self._registry.find(t)
        if known is None:
            return None
        copy, shift_bytes = known
        if not is_dense(t):  # found as a whole only
            return copy
        region = flat(copy).view(torch.uint8)[shift_bytes : shift_bytes + t.nbytes].view(t.dtype)
        return torch.as_strided(region, t.shape, t.stride())

    def end_forward(self) -> None:
        """Nothing more is put."""
        self._registry.clear()
