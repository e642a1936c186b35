"""Attention over the slices of one layer call: keys and values of all slices, and the gradients that meet there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.slices import TokenRange
from lightning_memo.kernels import AttentionBackend, AttentionResult, AttentionSpec

# Turns what a slice stored (a handle that only its run understands) into a tensor on the device.
Load = Callable[[Any], Tensor]


class AttentionCore:
    """Causal attention of slice after slice, without autograd.

    The forward of slice `i` meets the keys of slices `0 .. i` in one kernel call, so that its output is rounded once,
    as in plain training. Its backward, last slice first, adds to the key and value gradients of every slice it met, in
    fp32 for half-precision tensors.

    Args:
        backend: The kernel; several slices need one that computes blocks.
        slices: The token ranges, in order.
    """

    def __init__(self, backend: AttentionBackend, slices: Sequence[TokenRange]) -> None:
        self._backend = backend
        self._slices = slices
        self._keys_values: dict[int, tuple[Any, Any]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, load: Load) -> AttentionResult:
        """Attention of slice `index`: q, k, v are its own, `[batch, heads, tokens, head_dim]`."""
        seen = self._seen_by(index, spec)
        keys, values = self._join(seen, k, v, load)
        return self._backend.forward(q, keys, values, spec, self._slices[index].start, self._start(seen, index))

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
        seen = self._seen_by(index, spec)
        keys, values = self._join(seen, k, v, load)
        start = self._start(seen, index)
        dq, *dkv = self._backend.backward(dout, q, keys, values, result, spec, self._slices[index].start, start)
        lengths = [self._slices[n].tokens for n in (*seen, index)]
        parts = list(zip(*(grad.split(lengths, 2) for grad in dkv), strict=True))
        for earlier, (dk, dv) in zip(seen, parts, strict=False):
            self._accumulate(earlier, dk, dv)
        dk, dv = parts[-1]
        if index in self._gradients:
            later_dk, later_dv = self._gradients.pop(index)
            dk, dv = (later_dk + dk).to(k.dtype), (later_dv + dv).to(v.dtype)
        return dq, dk, dv

    def _seen_by(self, index: int, spec: AttentionSpec) -> list[int]:
        """Earlier slices of which the slice sees any key: those right before it."""
        start = self._slices[index].start
        return [n for n in range(index) if not spec.sees_nothing(start, self._slices[n].stop)]

    def _start(self, seen: list[int], index: int) -> int:
        return self._slices[seen[0] if seen else index].start

    def _join(self, seen: list[int], k: Tensor, v: Tensor, load: Load) -> tuple[Tensor, Tensor]:
        """Keys and values of the slices seen and of the slice itself, `[batch, heads, keys, head_dim]`."""
        if not seen:
            return k, v
        held = [self._keys_values[n] for n in seen]
        return torch.cat([*(load(key) for key, _ in held), k], 2), torch.cat(
            [*(load(value) for _, value in held), v], 2
        )

    def _accumulate(self, index: int, dk: Tensor, dv: Tensor) -> None:
        if index not in self._gradients:
            self._gradients[index] = (_fp32_copy(dk), _fp32_copy(dv))
            return
        sum_dk, sum_dv = self._gradients[index]
        sum_dk += dk
        sum_dv += dv


class _WholeAttention(torch.autograd.Function):
    """Attention outside of slices, differentiable."""

    @staticmethod
    def forward(ctx: Any, backend: AttentionBackend, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = backend.forward(q, k, v, spec)
        ctx.backend, ctx.spec, ctx.state = backend, spec, result.state
        ctx.save_for_backward(q, k, v, result.out, result.lse)
        return result.out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        result = AttentionResult(out, lse, ctx.state)
        return (None, None, *ctx.backend.backward(dout, q, k, v, result, ctx.spec))


def attend(backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of a module that is not among the engine's layers, or of a layer that runs plainly."""
    out: Tensor = _WholeAttention.apply(backend, spec, q, k, v)
    return out


def _fp32_copy(t: Tensor) -> Tensor:
    """A copy of its own, in fp32 if `t` is half precision."""
    dtype = torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else t.dtype
    return t.to(dtype, copy=True)
