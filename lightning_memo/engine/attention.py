"""Attention over the slices of one layer call: keys and values of all slices, and the gradients that meet there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.slices import TokenRange
from lightning_memo.kernels import AttentionBackend, AttentionResult, AttentionSpec, merge

# Turns what a slice stored (a handle that only its run understands) into a tensor on the device.
Load = Callable[[Any], Tensor]


class AttentionCore:
    """Causal attention of slice after slice, without autograd.

    The forward of slice `i` meets the keys of slices `0 .. i`; its backward, last slice first, adds to the key and value
    gradients of every slice it met, in fp32 for half-precision tensors.

    Args:
        backend: The kernel; several slices need one that computes blocks.
        slices: The token ranges, in order.
    """

    def __init__(self, backend: AttentionBackend, slices: Sequence[TokenRange]) -> None:
        self._backend = backend
        self._slices = slices
        self._keys_values: dict[int, tuple[Any, Any]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, load: Load
    ) -> AttentionResult:
        """Attention of slice `index`: q, k, v are its own, `[batch, heads, tokens, head_dim]`."""
        own = self._slices[index].start
        result: AttentionResult | None = None
        # Ascending, so that rows whose own keys are all padding have met a valid key before they meet none.
        for earlier in self._seen_by(index, spec):
            key, value = (load(handle) for handle in self._keys_values[earlier])
            block = self._backend.forward(q, key, value, spec, own, self._slices[earlier].start)
            result = block if result is None else merge(result, block)
        block = self._backend.forward(q, k, v, spec, own, own)
        if result is None:
            return block
        result = merge(result, block)
        # `merge` keeps fp32 and the layout of its inputs; the layer goes on in the dtype of its queries.
        return AttentionResult(result.out.to(q.dtype), result.lse)

    def hold(self, index: int, key: Any, value: Any) -> None:
        """Handles by which later slices, and the backward, find the keys and values of a slice."""
        self._keys_values[index] = (key, value)

    def backward(
        self,
        index: int,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        load: Load,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the slice's q, k, v, later slices' share included: those must have run before."""
        own = self._slices[index].start
        dq, dk, dv = self._backend.backward(dout, q, k, v, result, spec, own, own)
        if index in self._gradients:
            later_dk, later_dv = self._gradients.pop(index)
            dk, dv = (later_dk + dk).to(k.dtype), (later_dv + dv).to(v.dtype)
        earlier_slices = self._seen_by(index, spec)
        if earlier_slices and dq.dtype in (torch.float16, torch.bfloat16):
            dq = dq.float()
        for earlier in earlier_slices:
            key, value = (load(handle) for handle in self._keys_values[earlier])
            start = self._slices[earlier].start
            part_dq, part_dk, part_dv = self._backend.backward(dout, q, key, value, result, spec, own, start)
            dq = dq + part_dq
            self._accumulate(earlier, part_dk, part_dv)
        return dq.to(q.dtype), dk, dv

    def _seen_by(self, index: int, spec: AttentionSpec) -> list[int]:
        """Earlier slices of which the slice sees any key."""
        start = self._slices[index].start
        return [n for n in range(index) if not spec.sees_nothing(start, self._slices[n].stop)]

    def _accumulate(self, index: int, dk: Tensor, dv: Tensor) -> None:
        if index not in self._gradients:
            self._gradients[index] = (_fp32(dk), _fp32(dv))
            return
        sum_dk, sum_dv = self._gradients[index]
        sum_dk += dk
        sum_dv += dv


def _fp32(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
