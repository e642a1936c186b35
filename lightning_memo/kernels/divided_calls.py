"""Attention calls of more elements than kernels can index, divided into calls for some batch rows and heads.

Note: [Largest calls]
FlashAttention-2, also as PyTorch's own kernel, sums dq in fp32 `[batch, queries, heads, head_dim]`, and computes
offsets in it with 32 bits. Beyond 2^31 elements, gradients of later rows and documents are wrong without a word, or the
GPU reports an illegal memory access; its forward is right. Each sequence takes up to 127 more queries there, and heads
have padded sizes. cuDNN's backward is wrong as well, also for a single row (measured with 9.19).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import (
    AttentionBackend,
    AttentionResult,
    AttentionSpec,
    sees_nothing_result,
)

LARGEST_CALL = 2**31
"""Largest number of elements of a call's queries, padded as kernels do."""

_BLOCK = 128  # queries of a sequence are padded to a multiple of it


@dataclass(frozen=True, slots=True)
class CallPart:
    """Batch rows, heads of the queries, and heads of the keys and values, of one call."""

    rows: slice
    heads: slice
    key_heads: slice

    def of_queries(self, t: Tensor) -> Tensor:
        return t[self.rows, self.heads]

    def of_keys(self, t: Tensor) -> Tensor:
        return t[self.rows, self.key_heads]

    def of_spec(self, spec: AttentionSpec) -> AttentionSpec:
        lengths, documents = (None if each is None else each[self.rows] for each in (spec.lengths, spec.documents))
        return replace(spec, lengths=lengths, documents=documents)


def is_too_large(q: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Return whether a call has more than `LARGEST_CALL` elements.

    Args:
        q: Queries, `[batch, heads, queries, head_dim]`.
        v: Values.
        spec: The keys that each query sees.
    """
    return q.shape[0] * q.shape[1] * _elements_of_head(q, v, spec) > LARGEST_CALL


def parts_of_call(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> list[CallPart]:
    """Return the calls that a call is divided into, each of at most `LARGEST_CALL` elements or of one head.

    Args:
        q: Queries, `[batch, heads, queries, head_dim]`.
        k: Keys, `[batch, key heads, keys, head_dim]`.
        v: Values, with the heads of the keys.
        spec: The keys that each query sees.
    """
    batch, heads, key_heads = q.shape[0], q.shape[1], k.shape[1]
    most = max(LARGEST_CALL // _elements_of_head(q, v, spec), 1)
    if most < heads:
        of_heads = list(_parts_of_heads(heads, key_heads, most))
        return [CallPart(slice(row, row + 1), *each) for row in range(batch) for each in of_heads]
    step = most // heads
    rows = (slice(first, min(first + step, batch)) for first in range(0, batch, step))
    return [CallPart(each, slice(0, heads), slice(0, key_heads)) for each in rows]


def _elements_of_head(q: Tensor, v: Tensor, spec: AttentionSpec) -> int:
    sequences = max(map(len, spec.documents or ()), default=1)
    queries = (q.shape[2] + _BLOCK * sequences - 1) // _BLOCK * _BLOCK
    size = max(q.shape[3], v.shape[3])
    unit = 32 if size <= 128 else 64
    return queries * -(-size // unit) * unit


def _parts_of_heads(heads: int, key_heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Return at most `most` heads at a time, with their key heads: whole groups of heads where that is possible."""
    group = heads // key_heads
    if most >= group:
        step = most // group
        for first in range(0, key_heads, step):
            last = min(first + step, key_heads)
            yield slice(first * group, last * group), slice(first, last)
        return
    for key_head in range(key_heads):
        end = (key_head + 1) * group
        for first in range(key_head * group, end, most):
            yield slice(first, min(first + most, end)), slice(key_head, key_head + 1)


class DividedCalls:
    """Calls a kernel for some batch rows and heads at a time, see Note: [Largest calls].

    Rows and heads do not depend on each other. Only where heads of the queries that share a head of the keys are in
    different calls, their gradients of keys and values are rounded once for each call.

    Args:
        inner: The kernel.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name, self.blocks = inner.name, inner.blocks

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        result, states = sees_nothing_result(q, v), []
        for part in parts_of_call(q, k, v, spec):
            inputs = part.of_queries(q), part.of_keys(k), part.of_keys(v), part.of_spec(spec)
            found = self._inner.forward(*inputs, query_start, key_start)
            part.of_queries(result.out).copy_(found.out)
            part.of_queries(result.lse).copy_(found.lse)
            states.append(found.state)
        return replace(result, state=states)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        query_start: int = 0,
        key_start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part, state in zip(parts_of_call(q, k, v, spec), result.state, strict=True):
            inputs = part.of_queries(dout), part.of_queries(q), part.of_keys(k), part.of_keys(v)
            of_part = AttentionResult(part.of_queries(result.out), part.of_queries(result.lse), state)
            grads = self._inner.backward(*inputs, of_part, part.of_spec(spec), query_start, key_start)
            part.of_queries(dq).copy_(grads[0])
            part.of_keys(dk).add_(grads[1])
            part.of_keys(dv).add_(grads[2])
        return dq, dk, dv
