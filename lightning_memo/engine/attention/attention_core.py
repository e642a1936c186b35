"""Attention over the slices of one layer call: keys and values of all slices, and the gradients that meet there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.attention.key_value_gradients import DeviceGradients
from lightning_memo.engine.attention.keys_values import KeysValuesSource
from lightning_memo.kernels import AttentionBackend, AttentionResult, AttentionSpec
from lightning_memo.planner.token_slices import TokenRange


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
        self._keys_values: dict[int, KeysValuesSource] = {}
        self._gradients = DeviceGradients()

    def forward(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[AttentionResult, Tensor, Tensor]:
        """Attention of slice `index`, whose q, k, v `[batch, heads, tokens, head_dim]` are given.

        Returns:
            The result, and the keys and values that `hold` is to find.
        """
        earlier = [self._keys_values[n].peek() for n in self._seen_by(index, spec)]
        return self._attend(index, q, k, v, spec, earlier), k, v

    def forward_again(self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        """The forward of slice `index` in the backward, where its result was not stored."""
        return self._attend(index, q, k, v, spec, [self._keys_values[n].load() for n in self._seen_by(index, spec)])

    def hold(self, index: int, keys_values: KeysValuesSource) -> None:
        """Where later slices, and their backward, find the keys and values of a slice."""
        self._keys_values[index] = keys_values

    def end_forward(self) -> None:
        """No slice runs before the backward."""
        for keys_values in self._keys_values.values():
            keys_values.end_forward()

    def backward(
        self,
        index: int,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the slice's q, k, v, later slices' share included: those must have run before."""
        seen = self._seen_by(index, spec)
        keys, values = _join([self._keys_values[n].load() for n in seen], k, v)
        start = self._start(seen, index)
        dq, *dkv = self._backend.backward(dout, q, keys, values, result, spec, self._slices[index].start, start)
        lengths = [self._slices[n].tokens for n in (*seen, index)]
        parts = list(zip(*(grad.split(lengths, 2) for grad in dkv), strict=True))
        for earlier, (dk, dv) in zip(seen, parts, strict=False):
            self._gradients.add(earlier, dk, dv)
        return dq, *self._gradients.take(index, *parts[-1])

    def _attend(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, earlier: list[tuple[Tensor, Tensor]]
    ) -> AttentionResult:
        keys, values = _join(earlier, k, v)
        start = self._start(self._seen_by(index, spec), index)
        return self._backend.forward(q, keys, values, spec, self._slices[index].start, start)

    def _seen_by(self, index: int, spec: AttentionSpec) -> list[int]:
        """Earlier slices of which the slice sees any key: those right before it."""
        start = self._slices[index].start
        return [n for n in range(index) if not spec.sees_nothing(start, self._slices[n].stop)]

    def _start(self, seen: list[int], index: int) -> int:
        return self._slices[seen[0] if seen else index].start

    def release(self) -> None:
        """The layer's backward is over."""


def _join(earlier: list[tuple[Tensor, Tensor]], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of earlier slices and of the slice itself, `[batch, heads, keys, head_dim]`."""
    if not earlier:
        return k, v
    keys, values = zip(*earlier, (k, v), strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)


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
