"""Attention calls that are divided into several calls of a kernel: packed documents, and calls that are too large.

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
from lightning_memo.kernels.flash_attention import BandedFlash, DocumentRun, Piece, join_documents, pieces

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
    """Return whether a call has more than `LARGEST_CALL` elements, which kernels cannot index.

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


class PackedDocuments:
    """Calls a kernel once for each document that has both queries and keys in a block.

    Flash kernels compute consecutive documents of a batch row in one call.

    Args:
        inner: A kernel that computes blocks. It gets the spec without documents, and absolute positions.
    """

    blocks = True

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self._flash = inner if isinstance(inner, BandedFlash) else None
        self.name = inner.name

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        calls = self._calls(q, k, spec, query_start, key_start)
        parts = (self._forward(piece, q, k, v, query_start, key_start) for piece in calls)
        if len(calls) == 1 and _is_whole(calls[0], q, calls[0].queries):
            part = next(parts)
            return replace(part, state=[part.state])
        result, states = sees_nothing_result(q, v), []
        for piece, part in zip(calls, parts, strict=True):
            piece.of_queries(result.out).copy_(part.out)
            piece.of_queries(result.lse).copy_(part.lse)
            states.append(part.state)
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
        calls = self._calls(q, k, spec, query_start, key_start)
        parts = (
            self._backward(piece, dout, q, k, v, replace(result, state=state), query_start, key_start)
            for piece, state in zip(calls, result.state, strict=True)
        )
        if len(calls) == 1 and _is_whole(calls[0], q, calls[0].queries) and _is_whole(calls[0], k, calls[0].keys):
            return next(parts)
        # No two calls share a query or a key of a batch row, so gradients are copied and not summed.
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for piece, (dq_part, dk_part, dv_part) in zip(calls, parts, strict=True):
            piece.of_queries(dq).copy_(dq_part)
            piece.of_keys(dk).copy_(dk_part)
            piece.of_keys(dv).copy_(dv_part)
        return dq, dk, dv

    def _calls(self, q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int) -> list[Piece]:
        queries = range(query_start, query_start + q.shape[2])
        found = pieces(spec, q.shape[0], queries, range(key_start, key_start + k.shape[2]))
        if self._flash is None:
            return list(found)
        return list(join_documents(found, query_start - key_start, self._flash.longest_joined))

    def _forward(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, query_start: int, key_start: int
    ) -> AttentionResult:
        parts = piece.of_queries(q), piece.of_keys(k), piece.of_keys(v)
        if isinstance(piece, DocumentRun) and self._flash is not None:
            return self._flash.forward_run(*parts, piece)
        starts = query_start + piece.queries.start, key_start + piece.keys.start
        return self._inner.forward(*parts, piece.spec, *starts)

    def _backward(
        self,
        piece: Piece,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        query_start: int,
        key_start: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of one call; `result` has the output of all queries and the state of this call."""
        result = replace(result, out=piece.of_queries(result.out), lse=piece.of_queries(result.lse))
        parts = piece.of_queries(dout), piece.of_queries(q), piece.of_keys(k), piece.of_keys(v)
        if isinstance(piece, DocumentRun) and self._flash is not None:
            return self._flash.backward_run(*parts, result, piece)
        starts = query_start + piece.queries.start, key_start + piece.keys.start
        return self._inner.backward(*parts, result, piece.spec, *starts)


def _is_whole(piece: Piece, t: Tensor, tokens: slice) -> bool:
    """Return whether a call has all batch rows and all tokens of `t` `[batch, heads, tokens, head_dim]`."""
    return piece.batch == slice(0, t.shape[0]) and tokens == slice(0, t.shape[2])
