"""Attention of packed documents: a kernel call for each document, or for several that follow each other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import (
    AttentionBackend,
    AttentionResult,
    AttentionSpec,
    sees_nothing_result,
)
from lightning_memo.kernels.document_pieces import DocumentRun, Piece, join_documents, pieces
from lightning_memo.kernels.flash_attention import BandedFlash


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
