"""Packed documents of a block as kernel calls: one for each document, or one for a run of documents."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionSpec, to_device_async


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
