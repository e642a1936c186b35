"""Flash attention on CUDA: how a block becomes kernel calls, and the kernels of PyTorch and of cuDNN.

These kernels take no masks. Packed documents of a block are computed by *pieces* and *runs*: calls for one document, or
for several that follow each other. The kernels support a causal flag, a window that is aligned at the last query and
the last key, and grouped-query heads. Padding and windows are therefore expressed by *bands*: calls with some of the
batch rows, queries and keys of a block.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import (
    AttentionResult,
    AttentionSpec,
    sees_nothing_result,
    side_by_side,
    to_device_async,
    token_major,
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


@dataclass(frozen=True, slots=True)
class DocumentRun(Piece):
    """One kernel call for consecutive documents of a batch row, each of which ends at its last query and last key.

    Attributes:
        query_lengths: Number of queries of each document.
        key_lengths: Number of keys of each document, at least as many.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]

    @property
    def longest(self) -> tuple[int, int]:
        """Largest numbers of queries and of keys of a document."""
        return max(self.query_lengths), max(self.key_lengths)

    @property
    def left(self) -> int:
        """A query sees so many keys before its own position; -1 is unbounded."""
        window = self.spec.window
        return -1 if window is None or window >= max(self.key_lengths) else window - 1

    @property
    def right(self) -> int:
        """A query sees so many keys behind its own position; -1 is unbounded."""
        return 0 if self.spec.causal else -1

    @property
    def causal(self) -> bool:
        """Whether the window is that of the kernels' causal flag."""
        return self.left == -1 and self.right == 0

    def starts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where the queries and the keys of each document begin, and the end: int32 `[documents + 1]` each."""
        lengths = (self.query_lengths, self.key_lengths)
        queries, keys = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in lengths)
        return to_device_async(queries, device), to_device_async(keys, device)


def join_documents(found: Iterable[Piece], ahead: int, longest: int) -> Iterator[Piece]:
    """Join consecutive documents of a batch row into runs, and return what remains as it is.

    Args:
        found: Kernel calls in the order of batch rows and documents.
        ahead: Distance from the position of the block's first key to that of its first query.
        longest: Documents with more keys are not joined.
    """

    def joins(piece: Piece) -> bool:
        queries, keys = (each.stop - each.start for each in (piece.queries, piece.keys))
        ends_alike = piece.queries.stop + ahead == piece.keys.stop and queries <= keys
        # Each call draws random numbers of its own for dropout.
        return ends_alike and keys <= longest and piece.spec.lengths is None and not piece.spec.dropout

    for (first, stop), alike in groupby(found, lambda piece: (piece.batch.start, piece.batch.stop)):
        for run in _consecutive(alike, joins):
            rows = range(first, stop) if len(run) > 1 else ()
            yield from (_joined(run, row) for row in rows)
            yield from run if len(run) == 1 else ()


def _consecutive(found: Iterable[Piece], joins: Callable[[Piece], bool]) -> Iterator[list[Piece]]:
    """Return lists of calls that can be joined, or of one call."""
    run: list[Piece] = []
    for piece in found:
        follows = bool(run) and (run[-1].queries.stop, run[-1].keys.stop) == (piece.queries.start, piece.keys.start)
        if run and not (follows and joins(run[-1]) and joins(piece)):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _joined(run: Sequence[Piece], row: int) -> DocumentRun:
    lengths = [tuple(s.stop - s.start for s in each) for each in zip(*((p.queries, p.keys) for p in run), strict=True)]
    queries = slice(run[0].queries.start, run[-1].queries.stop)
    keys = slice(run[0].keys.start, run[-1].keys.stop)
    return DocumentRun(slice(row, row + 1), queries, keys, run[0].spec, lengths[0], lengths[1])


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


_LARGEST_CUDNN_HEAD = 128  # larger head sizes work on some GPUs only
_DROPOUT_STEPS = 16  # cuDNN's dropout probability is a multiple of 1/16
_WITHOUT_DROPOUT = range(91101, 91400)  # versions of cuDNN without dropout
_MERGED_HEADS = 4  # of which outputs are in fp32 at a time


class CudnnSdpa(AtenFlash):
    """cuDNN's attention (`aten::_scaled_dot_product_cudnn_attention`).

    Its causal flag is aligned at the first query and the first key, and it supports neither windows nor padding. The
    queries of a slice therefore see the keys of earlier slices in one call without a mask and their own in a causal
    call, and both results are merged. Windows and padded batches are passed on to PyTorch's flash kernel, and so is
    everything if deterministic algorithms are requested. Grouped-query attention needs no repeated heads; the
    gradients of keys and values are summed over the heads of the queries.

    Note: [Rounding of merged outputs]
    Each call rounds its output to half precision, and the merged output is rounded once more. With weights w and 1 - w
    of two outputs of equal size, the variance of the rounding error is 1 + w^2 + (1 - w)^2 times that of one call: 1.5
    times where a query sees as much of earlier slices as of its own.
    """

    name = "cudnn"
    longest_joined = LONGEST_OF_SLOWER

    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        if spec.window is not None or spec.lengths is not None or torch.are_deterministic_algorithms_enabled():
            return False
        if spec.dropout and (
            spec.dropout * _DROPOUT_STEPS % 1 or (torch.backends.cudnn.version() or 0) in _WITHOUT_DROPOUT
        ):
            return False
        parts = _cudnn_parts(q, k, spec, query_start, key_start)
        if not parts or (spec.dropout and len(parts) > 1):
            return False
        # With some versions of cuDNN, PyTorch refuses a single query or key.
        shortest = min(q.shape[2], *(keys.stop - keys.start for keys, _ in parts))
        return shortest > 1 and q.shape[3] <= _LARGEST_CUDNN_HEAD

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        if not self.serves(q, k, spec, query_start, key_start):
            return super().forward(q, k, v, spec, query_start, key_start)
        parts = [
            _cudnn_forward(q, k[:, :, keys], v[:, :, keys], replace(spec, causal=causal))
            for keys, causal in _cudnn_parts(q, k, spec, query_start, key_start)
        ]
        result = parts[0] if len(parts) == 1 else _merged_parts(*parts)
        return replace(result, state=[part.state for part in parts])

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
        if not self.serves(q, k, spec, query_start, key_start):
            return super().backward(dout, q, k, v, result, spec, query_start, key_start)
        dout, out, lse = token_major(dout), token_major(result.out), result.lse.contiguous()
        parts = [
            _cudnn_backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse, state, replace(spec, causal=causal))
            for (keys, causal), state in zip(
                _cudnn_parts(q, k, spec, query_start, key_start), result.state, strict=True
            )
        ]
        if len(parts) == 1:
            return parts[0]
        (dq, *earlier), (own_dq, *own) = parts
        dk, dv = (torch.cat(pair, 2) for pair in zip(earlier, own, strict=True))
        return dq.add_(own_dq), dk, dv


def _cudnn_parts(
    q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int
) -> tuple[tuple[slice, bool], ...]:
    """Return the keys and the causal flag of each call that a block consists of; none if it can't be divided so."""
    queries, keys = q.shape[2], k.shape[2]
    earlier = query_start - key_start
    if not spec.causal or earlier >= keys:
        return ((slice(0, keys), False),)
    if keys - earlier != queries or earlier < 0:
        return ()
    own = (slice(earlier, keys), True)
    return (own,) if earlier == 0 else ((slice(0, earlier), False), own)


def _merged_parts(earlier: AttentionResult, own: AttentionResult) -> AttentionResult:
    """Merge the results for the keys of earlier slices and of the own one, in the memory of the first."""
    own_weight = torch.sigmoid(own.lse - earlier.lse)[..., None]
    weight = torch.sigmoid(earlier.lse - own.lse)[..., None]  # 1 - own_weight would round where it is small
    for first in range(0, earlier.out.shape[1], _MERGED_HEADS):
        heads = slice(first, first + _MERGED_HEADS)
        merged = own.out[:, heads] * own_weight[:, heads]
        # Each output is read and written once, and converted on the way.
        torch.addcmul(merged, earlier.out[:, heads], weight[:, heads], out=earlier.out[:, heads])
    return replace(earlier, lse=torch.logaddexp(earlier.lse, own.lse))


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
    out, lse, *rest, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *map(side_by_side, (q, k, v)), None, True, spec.dropout, spec.causal, False, scale=spec.scale
    )
    # PyTorch's backward needs the log-sum-exp in the forward's shape, with or without a last dimension of 1.
    return AttentionResult(token_major(out), lse.reshape(q.shape[:3]), (lse.shape, rest))


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    lse_shape, (starts_q, starts_k, max_q, max_k, seed, offset) = state
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, *map(side_by_side, (q, k, v)), out, lse.reshape(lse_shape), seed, offset, None, starts_q, starts_k, max_q,
        max_k, spec.dropout, spec.causal, scale=spec.scale,
    )  # fmt: skip
    return dq, dk, dv
