"""Attention of packed documents: one kernel call per document, for kernels without support of documents."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import (
    AttentionBackend,
    AttentionResult,
    AttentionSpec,
    sees_nothing_result,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One kernel call: batch rows, and the queries and keys of a block that belong to one document.

    Attributes:
        batch: Batch rows.
        queries: Range of the block's queries.
        keys: Range of the block's keys.
        spec: The keys that each query sees, without documents.
    """

    batch: slice
    queries: slice
    keys: slice
    spec: AttentionSpec

    def of_queries(self, t: Tensor) -> Tensor:
        return t[self.batch, :, self.queries]

    def of_keys(self, t: Tensor) -> Tensor:
        return t[self.batch, :, self.keys]


def pieces(spec: AttentionSpec, batch: int, queries: range, keys: range) -> Iterator[Piece]:
    """Return the kernel calls that make up a block. Queries in none of them see no key.

    Args:
        spec: The keys that each query sees.
        batch: Number of batch rows. Neighbouring rows with the same documents are computed by one call.
        queries: Absolute positions of the block's queries.
        keys: Absolute positions of the block's keys.
    """
    documents = spec.documents or ((0,),) * batch
    for starts, group in groupby(range(batch), documents.__getitem__):
        rows = list(group)
        of_batch = slice(rows[0], rows[-1] + 1)
        lengths = None if spec.lengths is None else spec.lengths[of_batch]
        for first, last in _documents_of_both(starts, queries, keys):
            q, k = _overlap(queries, first, last), _overlap(keys, first, last)
            inside = lengths if lengths is not None and min(lengths) < k.stop else None
            piece = replace(spec, documents=None, lengths=inside)
            if not _blind(piece, q, k):
                yield Piece(of_batch, _within(q, queries), _within(k, keys), piece)


def sees_any(spec: AttentionSpec, queries: range, keys: range) -> bool:
    """Return whether any query of any batch row sees a key."""
    batch = len(spec.documents or spec.lengths or (0,))
    return any(True for _ in pieces(spec, batch, queries, keys))


def _documents_of_both(starts: tuple[int, ...], queries: range, keys: range) -> Iterator[tuple[int, int | None]]:
    """Iterate over the start and end of the documents that have queries and keys; the last document has no end."""
    first = max(bisect_right(starts, max(queries.start, keys.start)) - 1, 0)
    stop = bisect_left(starts, min(queries.stop, keys.stop))
    for n in range(first, stop):
        yield starts[n], starts[n + 1] if n + 1 < len(starts) else None


def _overlap(positions: range, first: int, last: int | None) -> range:
    stop = positions.stop if last is None else min(positions.stop, last)
    return range(max(positions.start, first), stop)


def _within(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _blind(spec: AttentionSpec, queries: range, keys: range) -> bool:
    """Return whether no query sees a key by the rules other than documents."""
    return (
        (spec.causal and keys.start >= queries.stop)
        or (spec.lengths is not None and keys.start >= max(spec.lengths))
        or spec.sees_nothing(queries.start, keys.stop)
    )


class PackedDocuments:
    """Calls a kernel once for each document that has both queries and keys in a block.

    Args:
        inner: A kernel that computes blocks. It gets the spec without documents, and absolute positions.
    """

    blocks = True

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        result, states = sees_nothing_result(q, v), []
        for piece in _pieces(q, k, spec, query_start, key_start):
            part = self._inner.forward(
                piece.of_queries(q), piece.of_keys(k), piece.of_keys(v), piece.spec,
                query_start + piece.queries.start, key_start + piece.keys.start,
            )  # fmt: skip
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
        # No two calls share a query or a key of a batch row, so gradients are copied and not summed.
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for piece, state in zip(_pieces(q, k, spec, query_start, key_start), result.state, strict=True):
            part = AttentionResult(piece.of_queries(result.out), piece.of_queries(result.lse), state)
            dq_part, dk_part, dv_part = self._inner.backward(
                piece.of_queries(dout), piece.of_queries(q), piece.of_keys(k), piece.of_keys(v), part, piece.spec,
                query_start + piece.queries.start, key_start + piece.keys.start,
            )  # fmt: skip
            piece.of_queries(dq).copy_(dq_part)
            piece.of_keys(dk).copy_(dk_part)
            piece.of_keys(dv).copy_(dv_part)
        return dq, dk, dv


def _pieces(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int) -> Iterator[Piece]:
    queries = range(query_start, query_start + q.shape[2])
    return pieces(spec, q.shape[0], queries, range(key_start, key_start + k.shape[2]))
