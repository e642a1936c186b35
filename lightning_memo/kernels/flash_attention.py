"""Flash attention on CUDA: PyTorch's own kernel, and what it has in common with those of the flash-attn packages.

These kernels support a causal flag, a window that is aligned at the last query and the last key, and grouped-query
heads, but no mask. Padding and windows of a block are therefore expressed by *bands*: calls with some of its batch
rows, queries and keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionResult, AttentionSpec, sees_nothing_result, side_by_side
from lightning_memo.kernels.document_pieces import DocumentRun

LONGEST_OF_SLOWER = 2048
"""Packed documents of at most so many keys are left to PyTorch's flash kernel by kernels that compute one at a time.

A causal call of so many tokens with 32 heads of size 128 takes about 0.1 ms on an H100, which is as long as its launch.
"""


@dataclass(frozen=True, slots=True)
class Band:
    """One kernel call for a part of a block.

    Attributes:
        batch: Batch rows.
        rows: Range of the block's queries.
        keys: Number of keys, from the block's first one on.
        left: With the last query and the last key at the same position, a query at `i` sees keys from `i - left` on;
            -1 is unbounded.
        right: Likewise, a query at `i` sees keys up to `i + right`.
    """

    batch: slice
    rows: slice
    keys: int
    left: int
    right: int

    @property
    def causal(self) -> bool:
        """Whether the window is that of the kernels' causal flag."""
        return self.left == -1 and self.right == 0

    @property
    def queries(self) -> int:
        return int(self.rows.stop - self.rows.start)


def bands(spec: AttentionSpec, batch: int, queries: range, keys: range) -> Iterator[Band]:
    """Return the kernel calls that make up a block. Queries in none of them see no key.

    Args:
        spec: The keys that each query sees.
        batch: Number of batch rows.
        queries: Absolute positions of the block's queries.
        keys: Absolute positions of the block's keys.
    """
    stops = [keys.stop] * batch if spec.lengths is None else [min(length, keys.stop) for length in spec.lengths]
    alike = len(set(stops)) == 1
    for row, stop in enumerate(stops[:1] if alike else stops):
        of_batch = slice(0, batch) if alike else slice(row, row + 1)
        if stop > keys.start and len(queries):
            yield from _row_bands(spec, of_batch, queries, keys.start, stop)


def _row_bands(spec: AttentionSpec, of_batch: slice, queries: range, start: int, stop: int) -> Iterator[Band]:
    """Return the bands of batch rows whose keys are those from `start` to `stop`; there is at least one key.

    Note: [Queries behind the last key]
    Kernels turn a window that is as long as the keys into an unbounded one, and an unbounded side into a window as long
    as the keys, whatever the number of queries. A window is therefore passed only where neither changes the result: for
    queries that end at the last key (`right` is 0), and for later queries (padding, or a block of earlier keys) in
    calls of at most one query more than keys.
    """
    first = queries.start
    if not spec.causal:
        yield Band(of_batch, slice(0, len(queries)), stop - start, -1, -1)
        return
    stop = min(stop, queries.stop)
    keys, window = stop - start, spec.window
    if keys <= 0:
        return
    among = max(first, start)
    if among < stop:
        left = -1 if window is None or window >= keys else window - 1
        yield Band(of_batch, slice(among - first, stop - first), keys, left, 0)
    behind = max(first, stop)
    end = queries.stop if window is None else min(queries.stop, stop + window - 1)
    step = max(end - behind, 1) if window is None else keys + 1
    for begin in range(behind, end, step):
        last = min(begin + step, end)
        left = -1 if window is None else stop - last + window - 1
        yield Band(of_batch, slice(begin - first, last - first), keys, -1 if left >= keys else left, -1)


class BandedFlash:
    """Base class of flash kernels on CUDA. Subclasses implement one call on `[batch, tokens, heads, head_dim]`.

    Attributes:
        longest_joined: Packed documents of at most so many keys are computed together, in one call for a batch row.
    """

    name = "flash"
    blocks = True
    longest_joined = sys.maxsize

    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        return True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        calls = self._bands(q, k, spec, query_start, key_start)
        parts = [self._call(*self._inputs(band, q, k, v), spec, band) for band in calls]
        states = [state for _, _, state in parts]
        if len(calls) == 1 and _covers(calls[0], q):
            # PyTorch's kernels return the layout of the queries.
            return AttentionResult(parts[0][0].contiguous().transpose(1, 2), parts[0][1], states)
        result = sees_nothing_result(q, v)
        for band, (part, part_lse, _) in zip(calls, parts, strict=True):
            result.out[band.batch, :, band.rows] = part.transpose(1, 2)
            result.lse[band.batch, :, band.rows] = part_lse
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
        calls = self._bands(q, k, spec, query_start, key_start)
        if len(calls) == 1 and _covers(calls[0], q) and calls[0].keys == k.shape[2]:
            dq, dk, dv = self._part_of_backward(calls[0], dout, q, k, v, result, spec, result.state[0])
            return dq, dk, dv
        grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        for band, state in zip(calls, result.state, strict=True):
            parts = self._part_of_backward(band, dout, q, k, v, result, spec, state)
            seen = slice(0, band.keys)
            for grad, part, tokens in zip(grads, parts, (band.rows, seen, seen), strict=True):
                grad[band.batch, :, tokens] += part
        return grads

    def forward_run(self, q: Tensor, k: Tensor, v: Tensor, run: DocumentRun) -> AttentionResult:
        """Compute consecutive packed documents in one call.

        Args:
            q: Their queries, `[1, heads, queries, head_dim]`.
            k: Their keys.
            v: Their values.
            run: The documents.
        """
        out, lse = self._call_run(*map(_of_row, (q, k, v)), run, run.starts(q.device))
        return AttentionResult(out.contiguous().transpose(0, 1)[None], lse[None])

    def backward_run(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: AttentionResult, run: DocumentRun
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        dout, out = (_of_row(t).contiguous() for t in (dout, result.out))
        lse, starts = result.lse[0].contiguous(), run.starts(q.device)
        grads = self._call_run_backward(dout, *map(_of_row, (q, k, v)), out, lse, run, starts)
        dq, dk, dv = (grad.transpose(0, 1)[None] for grad in grads)
        return dq, dk, dv

    def _part_of_backward(
        self,
        band: Band,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        state: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of one call, `[batch, heads, tokens, head_dim]`."""
        rows = (band.batch, slice(None), band.rows)
        out, dout = result.out[rows].transpose(1, 2).contiguous(), dout[rows].transpose(1, 2).contiguous()
        q, k, v = self._inputs(band, q, k, v)
        dq, dk, dv = self._call_backward(dout, q, k, v, out, result.lse[rows].contiguous(), spec, band, state)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    @staticmethod
    def _bands(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int) -> list[Band]:
        queries = range(query_start, query_start + q.shape[2])
        keys = range(key_start, key_start + k.shape[2])
        return list(bands(spec, q.shape[0], queries, keys))

    @staticmethod
    def _inputs(band: Band, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the q, k and v of a call, `[batch, tokens, heads, head_dim]`."""
        tokens = slice(0, band.keys)
        parts = (q[band.batch, :, band.rows], k[band.batch, :, tokens], v[band.batch, :, tokens])
        q, k, v = (side_by_side(t).transpose(1, 2) for t in parts)
        return q, k, v

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, band: Band) -> tuple[Tensor, Tensor, Any]:
        """Return output, log-sum-exp `[batch, heads, tokens]`, and the random state of dropout for the backward."""
        raise NotImplementedError

    def _call_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        band: Band,
        state: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        raise NotImplementedError

    def _call_run(
        self, q: Tensor, k: Tensor, v: Tensor, run: DocumentRun, starts: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return output `[tokens, heads, head_dim]`, and log-sum-exp `[heads, tokens]`.

        Args:
            q: Queries, `[tokens, heads, head_dim]`.
            k: Keys.
            v: Values.
            run: The documents.
            starts: Where the queries and the keys of each document begin, see `DocumentRun.starts`.
        """
        raise NotImplementedError

    def _call_run_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        run: DocumentRun,
        starts: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        raise NotImplementedError


def _of_row(t: Tensor) -> Tensor:
    """Return a batch row `[1, heads, tokens, head_dim]` as `[tokens, heads, head_dim]`."""
    return side_by_side(t)[0].transpose(0, 1)


def _covers(band: Band, q: Tensor) -> bool:
    return band.batch == slice(0, q.shape[0]) and band.rows == slice(0, q.shape[2])


class AtenFlash(BandedFlash):
    """PyTorch's own flash kernel (`aten::_flash_attention_forward`), for half precision and `head_dim` up to 256."""

    name = "sdpa"

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, band: Band) -> tuple[Tensor, Tensor, Any]:
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], spec.dropout, band.causal, False, scale=spec.scale,
            **_window(band),
        )  # fmt: skip
        return out, lse, (seed, offset) if spec.dropout else None

    def _call_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        band: Band,
        state: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        seed, offset = (unused, unused) if state is None else state
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], spec.dropout, band.causal, seed, offset,
            scale=spec.scale, **_window(band),
        )  # fmt: skip
        return dq, dk, dv

    def _call_run(
        self, q: Tensor, k: Tensor, v: Tensor, run: DocumentRun, starts: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *starts, *run.longest, 0.0, run.causal, False, scale=run.spec.scale, **_window(run)
        )
        return out, lse

    def _call_run_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        run: DocumentRun,
        starts: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *starts, *run.longest, 0.0, run.causal, unused, unused, scale=run.spec.scale,
            **_window(run),
        )  # fmt: skip
        return dq, dk, dv


def _window(band: Band | DocumentRun) -> dict[str, int]:
    """Return the window's arguments. A causal call has none, like plain attention, so that the same kernel is run.

    The same holds for a call without limits: FlashAttention-4 refuses any window in its backward in torch 2.11.
    """
    sides = {} if band.causal else {"window_size_left": band.left, "window_size_right": band.right}
    return {side: tokens for side, tokens in sides.items() if tokens >= 0}
