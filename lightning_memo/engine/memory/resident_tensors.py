"""Saved tensors that stay resident on the device because the plan says so."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.engine.memory.saved_storages import KeptTensor, Registry, flat, gapless_strides, is_dense


class ResidentTensors:
    """A layer call's resident tensors, without gaps, each byte once.

    Most are copies, like swapped tensors, for two reasons: a layer may overwrite its input or the output of a matrix
    product, and a view of a tensor would keep the complete storage alive.

    Attributes:
        size_bytes: Total size of the tensors.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._registry: Registry[KeptTensor | Tensor] = Registry()

    def put(self, t: Tensor) -> Tensor:
        """Copy a tensor and return the copy."""
        if is_dense(t):
            copy = torch.as_strided(flat(t).clone(), t.shape, t.stride())
        else:
            copy = torch.empty_strided(t.shape, gapless_strides(t.shape, t), dtype=t.dtype, device=t.device).copy_(t)
        self.size_bytes += copy.nbytes
        self._registry.add(t, copy)
        return copy

    def keep(self, t: Tensor) -> KeptTensor | Tensor:
        """Keep a tensor that nothing may overwrite, as autograd would, or a copy if `t` is a part of its storage."""
        if t.nbytes < t.untyped_storage().nbytes() or t.is_inference():
            return self.put(t)
        kept = KeptTensor.of(t)
        self.size_bytes += t.nbytes
        self._registry.add(t, kept)
        return kept

    def find(self, t: Tensor) -> KeptTensor | Tensor | None:
        """Return what stands for a tensor whose bytes are resident, or `None`."""
        known = self._registry.find(t)
        if known is None:
            return None
        resident, shift_bytes = known
        if isinstance(resident, KeptTensor):
            return KeptTensor.of(t)  # the registry finds a tensor only while it is unchanged
        if not is_dense(t):  # the registry finds such a tensor only with the same shape and strides
            return resident
        data = flat(resident).view(torch.uint8)[shift_bytes : shift_bytes + t.nbytes].view(t.dtype)
        return torch.as_strided(data, t.shape, t.stride())

    def end_forward(self) -> None:
        """End the forward: nothing more will be put or looked up."""
        self._registry.clear()
