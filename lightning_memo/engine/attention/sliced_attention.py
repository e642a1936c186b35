"""Attention with the keys and values of all tokens on the device: of a layer call slice by slice, or of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memo.engine.attention.attention_sinks import gradient_of_sinks, merge_sinks
from lightning_memo.kernels import AttentionBackend, AttentionResult, AttentionSpec
from lightning_memo.kernels.attention_kernel import sums_dtype
from lightning_memo.planner.token_slices import TokenRange

_KeysValues = tuple[Tensor, Tensor]


class KeysValuesSource(Protocol):
    """Keys and values of one slice, `[batch, heads, tokens, head_dim]`, stored or recomputed."""

    def peek(self) -> tuple[Tensor, Tensor]:
        """Return both while the forward still runs."""

    def end_forward(self) -> None:
        """Drop what only the forward needs."""

    def load(self) -> tuple[Tensor, Tensor]:
        """Return both on the device in the backward."""


class SlicedAttention:
    """Causal attention slice by slice, without autograd.

    The forward of slice `i` attends to the keys of slices `0 .. i` in one kernel call, so that its output is rounded
    once, as in plain training. The backward runs from the last slice to the first. It adds to the key and value
    gradients of every slice that the forward attended to, in fp32 for half-precision tensors.

    Args:
        backend: The kernel. For more than one slice it must compute blocks.
        slices: The token ranges of the slices, in order.
    """

    def __init__(self, backend: AttentionBackend, slices: Sequence[TokenRange]) -> None:
        self._backend = backend
        self._slices = slices
        self._keys_values: dict[int, KeysValuesSource] = {}
        self._joined = _JoinedSlices([part.tokens for part in slices])
        self._gradients = DeviceGradients()

    def forward(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[AttentionResult, Tensor, Tensor]:
        """Compute the attention of slice `index`.

        Args:
            index: Number of the slice.
            q: Queries of the slice, `[batch, heads, tokens, head_dim]`.
            k: Keys of the slice.
            v: Values of the slice.
            spec: The keys that each query sees.

        Returns:
            The result, and the keys and values to pass to `hold` once they are stored.
        """
        return self._attend(index, q, k, v, spec, lambda n: self._keys_values[n].peek()), k, v

    def forward_again(self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        """Compute the attention of slice `index` again in the backward, if its result was not stored."""
        return self._attend(index, q, k, v, spec, lambda n: self._keys_values[n].load())

    def hold(self, index: int, keys_values: KeysValuesSource) -> None:
        """Register the keys and values of a slice for later slices and for the backward."""
        self._keys_values[index] = keys_values

    def end_forward(self) -> None:
        """End the layer's forward: no slice runs before the backward."""
        self._joined.clear()
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
        """Return the gradients of the slice's q, k and v, including the contributions of later slices.

        The backward of all later slices must have run before.
        """
        seen = self._seen_by(index, spec)
        keys, values = self._join(index, k, v, spec, lambda n: self._keys_values[n].load())
        start = self._start(seen, index)
        dq, *dkv = self._backend.backward(dout, q, keys, values, result, spec, self._slices[index].start, start)
        if index == 0:
            self._joined.clear()
        if not seen:  # keys of another sequence may have another length
            return dq, *self._gradients.take(index, *dkv)
        lengths = [self._slices[n].tokens for n in (*seen, index)]
        parts = list(zip(*(grad.split(lengths, 2) for grad in dkv), strict=True))
        for earlier, (dk, dv) in zip(seen, parts, strict=False):
            self._gradients.add(earlier, dk, dv)
        return dq, *self._gradients.take(index, *parts[-1])

    def _attend(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bring: Callable[[int], _KeysValues]
    ) -> AttentionResult:
        keys, values = self._join(index, k, v, spec, bring)
        start = self._start(self._seen_by(index, spec), index)
        return self._backend.forward(q, keys, values, spec, self._slices[index].start, start)

    def _join(
        self, index: int, k: Tensor, v: Tensor, spec: AttentionSpec, bring: Callable[[int], _KeysValues]
    ) -> _KeysValues:
        """Return the keys and values that the slice sees, `[batch, heads, keys, head_dim]`.

        Args:
            index: Number of the slice.
            k: Keys of the slice.
            v: Values of the slice.
            spec: The keys that each query sees.
            bring: Returns the keys and values of an earlier slice.
        """
        seen = self._seen_by(index, spec)
        if not seen:
            return k, v
        if spec.window is None:
            return self._joined.up_to(index, k, v, bring)
        # Buffers for all slices would waste memory.
        keys, values = zip(*map(bring, seen), (k, v), strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def _seen_by(self, index: int, spec: AttentionSpec) -> list[int]:
        """Return the earlier slices of which the slice sees any key. They directly precede it."""
        start = self._slices[index].start
        return [n for n in range(index) if not spec.sees_nothing(start, self._slices[n].stop)]

    def _start(self, seen: list[int], index: int) -> int:
        return self._slices[seen[0] if seen else index].start

    def rewind(self) -> None:
        """End a backward that another one may follow."""
        self._joined.clear()
        self._gradients = DeviceGradients()

    def release(self) -> None:
        """End the layer's backward."""
        self._joined.clear()


class DeviceGradients:
    """Gradients of keys and values, to which later slices add their contributions, on the device.

    They are in fp32 for half precision.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, index: int, dk: Tensor, dv: Tensor) -> None:
        """Add a later slice's contribution to the gradients of slice `index`, `[batch, heads, tokens, head_dim]`."""
        if index not in self._sums:
            self._sums[index] = (dk.to(sums_dtype(dk), copy=True), dv.to(sums_dtype(dv), copy=True))
            return
        for total, part in zip(self._sums[index], (dk, dv), strict=True):
            total += part

    def take(self, index: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of slice `index`, including its own contributions `dk` and `dv`."""
        if index not in self._sums:
            return dk, dv
        later_dk, later_dv = self._sums.pop(index)
        return (later_dk + dk).to(dk.dtype), (later_dv + dv).to(dv.dtype)


class _JoinedSlices:
    """The keys and values of the first slices of a layer call, side by side, to which each slice is copied once.

    The forward adds slice after slice. The backward begins with all slices, and then uses ever fewer of them.

    Args:
        tokens: Number of tokens of each slice.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._stops = list(accumulate(tokens))
        self._buffers: _KeysValues | None = None
        self._slices = 0  # that the buffers hold

    def up_to(self, index: int, k: Tensor, v: Tensor, bring: Callable[[int], _KeysValues]) -> _KeysValues:
        """Return the keys and values of the slices up to `index`, whose own are `k` and `v`."""
        if self._buffers is None:
            self._buffers = self._empty(k), self._empty(v)
        for n in range(self._slices, index + 1):
            self._copy(n, (k, v) if n == index else bring(n))
        self._slices = max(self._slices, index + 1)
        keys, values = (buffer[:, :, : self._stops[index]] for buffer in self._buffers)
        return keys, values

    def clear(self) -> None:
        """Drop the buffers."""
        self._buffers, self._slices = None, 0

    def _empty(self, like: Tensor) -> Tensor:
        batch, heads, _, head_dim = like.shape
        return like.new_empty(batch, heads, self._stops[-1], head_dim)

    def _copy(self, n: int, keys_values: _KeysValues) -> None:
        assert self._buffers is not None
        start = self._stops[n - 1] if n else 0
        for buffer, part in zip(self._buffers, keys_values, strict=True):
            buffer[:, :, start : self._stops[n]] = part


def attend(backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Compute the attention of a module outside the engine's layers, or of a layer that runs as in plain training.

    Args:
        backend: The kernel.
        q: Queries, `[batch, heads, tokens, head_dim]`.
        k: Keys.
        v: Values.
        spec: The keys that each query sees.

    Returns:
        The output, `[batch, heads, tokens, head_dim]`, with autograd history.
    """
    out: Tensor = _WholeAttention.apply(backend, replace(spec, sinks=None), q, k, v, spec.sinks)
    return out


class _WholeAttention(torch.autograd.Function):
    """Attention of a complete sequence, differentiable."""

    @staticmethod
    def forward(
        ctx: Any, backend: AttentionBackend, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        result = merge_sinks(backend.forward(q, k, v, spec), sinks)
        ctx.backend, ctx.spec, ctx.state = backend, spec, result.state
        ctx.save_for_backward(q, k, v, result.out, result.lse, sinks)
        return result.out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        result = AttentionResult(out, lse, ctx.state)
        dsinks = gradient_of_sinks(dout, result, sinks) if ctx.needs_input_grad[5] else None
        return (None, None, *ctx.backend.backward(dout, q, k, v, result, ctx.spec), dsinks)
