"""Rows of a fixed length from documents, packed or one by one: of documents at hand, or of an endless stream."""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from typing_extensions import override

from lightning_memo.data.document_files import DocumentReader, DocumentStream, Place
from lightning_memo.data.documents import LEAST_TOKENS, Document, has_targets, part
from lightning_memo.data.resumable_loader import SequenceDataset, balanced_order, end_with_parent
from lightning_memo.parallel.ranks import gather

IGNORED = -100
"""Label of a token that is no target."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents that make up rows, as arrays `[pieces]`. The pieces of a row are consecutive.

    Attributes:
        document: Document of each piece.
        start: Index of the first token of each piece in its document.
        stop: Index after the last token of each piece.
        row: Row of each piece, in non-decreasing order.
    """

    document: Numbers
    start: Numbers
    stop: Numbers
    row: Numbers


def best_fit(
    lengths: Numbers, seq_len: int, is_useful: Callable[[int, int, int], bool] = lambda document, start, stop: True
) -> Pieces:
    """Packs documents into rows of `seq_len` tokens by best fit, longest documents first.

    Documents longer than a row are split into pieces of `seq_len` tokens and a remainder. A remainder of one token is
    dropped. No other document is split. ("Fewer Truncations Improve Language Modeling", Ding et al. 2024, section 3.)

    Args:
        lengths: Number of tokens in each document.
        seq_len: Number of tokens in a row.
        is_useful: Whether a piece of a document that was split, from a start to a stop, is kept.
    """
    counts = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(document)) - np.repeat(counts.cumsum() - counts, counts)
    start = nth * seq_len
    stop = np.minimum(start + seq_len, lengths[document])
    useful = stop - start >= LEAST_TOKENS
    for n in np.flatnonzero(useful & (counts[document] > 1)):
        useful[n] = is_useful(int(document[n]), int(start[n]), int(stop[n]))
    longest_first = np.argsort(start - stop, kind="stable")
    order = longest_first[useful[longest_first]]
    row = _rows((stop - start)[order].tolist(), seq_len)
    by_row = np.argsort(row, kind="stable")
    order = order[by_row]
    return Pieces(document[order], start[order], stop[order], row[by_row])


def _rows(sizes: Sequence[int], seq_len: int) -> Numbers:
    """Returns the row of each piece."""
    rows = np.empty(len(sizes), dtype=np.int64)
    open_rows: list[tuple[int, int]] = []  # free tokens and row number, sorted
    count = 0
    for n, size in enumerate(sizes):
        at = bisect_left(open_rows, (size,))
        if at < len(open_rows):
            room, rows[n] = open_rows.pop(at)
        else:
            room, rows[n] = seq_len, count
            count += 1
        if room - size >= LEAST_TOKENS:
            insort(open_rows, (room - size, int(rows[n])))
    return rows


class _DocumentRows(SequenceDataset):
    """Rows of `[seq_len]` tokens made of documents. Pieces of documents that were cut have targets, or are left out.

    Args:
        documents: Documents by number, each with targets.
        lengths: Number of tokens in each document.
        seq_len: Number of tokens in a row.
        pad_id: Id that fills the rest of a row.

    Attributes:
        tokens: Number of document tokens in all rows.
    """

    tokens: int

    def __init__(self, documents: Any, lengths: Numbers, seq_len: int, pad_id: int) -> None:
        self._documents, self._seq_len, self._pad_id = documents, seq_len, pad_id
        self._masked = len(documents) > 0 and "counted" in documents[0]

    def _is_useful(self, document: int, start: int, stop: int) -> bool:
        return not self._masked or has_targets(part(self._documents[document], start, stop))


class PackedRows(_DocumentRows):
    """Rows of several documents: `{"input_ids", "labels", "position_ids"}`; see `_DocumentRows`.

    Positions restart at 0 in each document, by which transformers models recognize packed documents. The rest of a row
    is another document without labels. The first token of a document is never a target.
    """

    def __init__(self, documents: Any, lengths: Numbers, seq_len: int, pad_id: int) -> None:
        super().__init__(documents, lengths, seq_len, pad_id)
        self._pieces = best_fit(lengths, seq_len, self._is_useful)
        self.tokens = int((self._pieces.stop - self._pieces.start).sum())
        self._edges = np.flatnonzero(np.diff(self._pieces.row, prepend=-1, append=-1))
        self.costs = self._costs()

    @override
    def __len__(self) -> int:
        return len(self._edges) - 1

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        p = self._pieces
        pieces = [
            part(self._documents[int(p.document[n])], p.start[n], p.stop[n])
            for n in range(self._edges[index], self._edges[index + 1])
        ]
        return _packed_row(pieces, self._seq_len, self._pad_id)

    def _costs(self) -> npt.NDArray[np.float64]:
        """Returns the squared lengths of the documents of each row, to which the time of attention is proportional."""
        tokens = (self._pieces.stop - self._pieces.start).astype(np.float64)
        if not len(tokens):
            return tokens
        of_row = functools.partial(np.add.reduceat, indices=self._edges[:-1])
        squares: npt.NDArray[np.float64] = of_row(tokens**2) + (self._seq_len - of_row(tokens)) ** 2
        return squares


def _packed_row(documents: Sequence[Document], seq_len: int, pad_id: int) -> dict[str, Tensor]:
    ids = torch.full((seq_len,), pad_id)
    labels = torch.full((seq_len,), IGNORED)
    edges = np.cumsum([0, *(len(document["ids"]) for document in documents)]).tolist()
    for document, (start, stop) in zip(documents, pairwise(edges), strict=True):
        ids[start:stop], labels[start:stop] = _ids_and_labels(document)
        labels[start] = IGNORED
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise([*edges, seq_len])])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _ids_and_labels(document: Document) -> tuple[Tensor, Tensor]:
    """Returns the ids and labels of a document, `[tokens]` each."""
    ids = torch.from_numpy(np.asarray(document["ids"])).long()
    if "counted" not in document:
        return ids, ids
    return ids, ids.masked_fill(~torch.from_numpy(np.asarray(document["counted"])), IGNORED)


class PaddedRows(_DocumentRows):
    """Rows of one document: `{"input_ids", "labels", "attention_mask"}`; see `_DocumentRows`.

    Longer documents are truncated. Shorter ones are padded on the right.
    """

    def __init__(self, documents: Any, lengths: Numbers, seq_len: int, pad_id: int) -> None:
        super().__init__(documents, lengths, seq_len, pad_id)
        useful = lengths <= seq_len
        for n in np.flatnonzero(~useful):
            useful[n] = self._is_useful(int(n), 0, seq_len)
        self._kept = np.flatnonzero(useful)
        self.tokens = int(np.minimum(lengths[self._kept], seq_len).sum())

    @override
    def __len__(self) -> int:
        return len(self._kept)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        document = part(self._documents[int(self._kept[index])], 0, self._seq_len)
        size = len(document["ids"])
        ids = torch.full((self._seq_len,), self._pad_id)
        labels = torch.full((self._seq_len,), IGNORED)
        ids[:size], labels[:size] = _ids_and_labels(document)
        return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(self._seq_len) < size).long()}


Batch = dict[str, Tensor]


def read_block(
    reader: DocumentReader,
    enough: Callable[[int, int], bool],
    mine: Callable[[int], bool] = lambda number: True,
) -> list[Document]:
    """Returns the next tokenized documents of a reader, or an empty list at the end.

    Args:
        reader: Reader, which continues after the last document of the block.
        enough: Whether a block with a number of documents and a number of tokens is complete.
        mine: Whether the document with a number belongs to the block.
    """
    block: list[Document] = []
    tokens = 0
    for number, record in reader:
        if not mine(number) or not has_targets(document := reader.encode(record)):
            continue
        block.append(document)
        tokens += len(document["ids"])
        if enough(len(block), tokens):
            break
    return block


@dataclass(frozen=True, slots=True)
class _PackedRow:
    """A row of a block, and its position in the stream."""

    place: Place
    rows: _DocumentRows
    index: int

    @property
    def cost(self) -> float:
        return 0.0 if self.rows.costs is None else float(self.rows.costs[self.index])


@dataclass(frozen=True, kw_only=True)
class RowStream:
    """Endless rows of documents that are packed block by block.

    Attributes:
        documents: Documents to read.
        start: Position of the first training document. Earlier documents are for validation.
        rows_of: Makes rows from a block.
        window: Number of rows that are ordered together. A block of documents has about as many.
        seq_len: Number of tokens in a row.
        batch_size: Number of rows in a batch.
        balance: Whether all data-parallel ranks get rows of about the same cost at the same time.
        seed: Seed of the order of the rows in a window.
    """

    documents: DocumentStream
    start: Place
    rows_of: Callable[[list[Document]], _DocumentRows]
    window: int
    seq_len: int
    batch_size: int
    balance: bool
    seed: int

    def rows(self, place: Place | None, rank: int, count: int) -> Iterator[tuple[Place, Batch]]:
        """Yields rows of every `count`-th document, each with the position after it. The stream repeats at the end.

        Windows of rows are ordered by cost, and then in an order that is the same for all ranks. They are equally long
        for all ranks, and so may hold the rows of several blocks.

        A position is that of a window, by the block and the number of its first row, and the number of its rows that
        were already returned. Resuming reads the blocks of the window again.

        Args:
            place: Position to start from; None for the beginning.
            rank: Data-parallel rank, which selects the documents.
            count: Data-parallel size.

        Raises:
            ValueError: A document cannot be read, or there is no document for this rank.
        """
        place = place or {"round": 0, "block": self.start, "skip": 0, "window": 0, "given": 0}
        packed, number, given = self._packed(place, rank, count), place["window"], place["given"]
        while True:
            window = list(islice(packed, self.window))
            first = window[0].place
            for n in self._order(window, number)[given:]:
                given += 1
                yield {**first, "window": number, "given": given}, window[n].rows[window[n].index]
            number, given = number + 1, 0

    def _order(self, window: list[_PackedRow], number: int) -> list[int]:
        random = np.random.default_rng((self.seed, number))
        costs = [row.cost for row in window] if self.balance else [0.0] * len(window)
        return [int(n) for n in balanced_order(np.array(costs), self.batch_size, random)]

    def _packed(self, place: Place, rank: int, count: int) -> Iterator[_PackedRow]:
        """Yields all rows from a position on, in the order in which they were packed."""
        turn, block, skip = place["round"], place["block"], place["skip"]
        reader = DocumentReader(self.documents, block)
        found = block != self.start  # a row in this round
        while True:
            rows = self._next_rows(reader, rank, count)
            if rows is not None:
                for index in range(skip, len(rows)):
                    yield _PackedRow({"round": turn, "block": block, "skip": index}, rows, index)
                found = found or len(rows) > 0
                block, skip = reader.place(), 0
            elif found:
                turn, block, found = turn + 1, self.start, False
                reader = DocumentReader(self.documents, block)
            else:
                raise ValueError(
                    f"path={self.documents.source.path}: no document is left for data-parallel group {rank + 1} of"
                    f" {count}; give more documents, or lower val_documents"
                )

    def _next_rows(self, reader: DocumentReader, rank: int, count: int) -> _DocumentRows | None:
        block = read_block(
            reader,
            enough=lambda documents, tokens: tokens >= self.window * self.seq_len,
            mine=lambda number: number % count == rank,
        )
        return self.rows_of(block) if block else None


@dataclass
class _Batches(IterableDataset[Any]):
    """Batches of a stream, each with the position after it.

    An error is returned as the last item, because workers would raise it with a traceback.
    """

    stream: RowStream
    rank: int
    count: int
    place: Place | None = None

    @override
    def __iter__(self) -> Iterator[Any]:
        batch: list[Batch] = []
        try:
            for place, row in self.stream.rows(self.place, self.rank, self.count):
                batch.append(row)
                if len(batch) == self.stream.batch_size:
                    yield place, default_collate(batch)
                    batch = []
        except ValueError as error:
            yield error


class StreamLoader:
    """Loads batches of a stream. Lightning's checkpoints save the position, and a run is a single epoch.

    Args:
        stream: Stream to load.
        batches: Length of an epoch for Lightning.
        num_workers: 0, or 1 for a process that reads ahead.
        rank: Data-parallel rank of this process.
        count: Data-parallel size. Each rank gets its own documents.
        unfinished: As in `lightning_memo.data.resumable_loader.ResumableLoader`.
    """

    def __init__(
        self,
        stream: RowStream,
        batches: int,
        num_workers: int,
        rank: int,
        count: int,
        unfinished: Callable[[], int],
    ) -> None:
        self._batches = _Batches(stream, rank, count)
        self._length, self._num_workers, self._unfinished = batches, num_workers, unfinished
        self._before: Place | None = None
        self._place: Place | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so that the position is read at the first batch, after a checkpoint was loaded.
        self._batches.place = self._place
        # A generator of its own: creating an iterator must not change the random numbers of the model.
        numbers = torch.Generator().manual_seed(0)
        for item in DataLoader(
            self._batches,
            batch_size=None,
            num_workers=self._num_workers,
            worker_init_fn=end_with_parent,
            generator=numbers,
        ):
            if isinstance(item, ValueError):
                raise item
            self._before, (self._place, batch) = self._place, item
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the positions of all data-parallel ranks. All ranks call it."""
        place = self._before if self._unfinished() else self._place
        return {"places": dict(gather((self._batches.rank, place))), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position.

        Raises:
            ValueError: The checkpoint was written with other files, sizes or seed.
        """
        saved = {name: state.get(name) for name in self._identity()}
        if saved != self._identity():
            texts = [", ".join(f"{n}={v}" for n, v in values.items()) for values in (saved, self._identity())]
            raise ValueError(
                f"ckpt_path: the checkpoint's stream was {texts[0]}, now it is {texts[1]}; resume with the same data"
                " settings and as many data-parallel groups, or start anew from its weights"
            )
        self._before = self._place = state["places"][self._batches.rank]

    def _identity(self) -> dict[str, Any]:
        of = self._batches.stream
        sizes = {"seq_len": of.seq_len, "buffer_rows": of.window, "batch_size": of.batch_size, "balance": of.balance}
        return {"files": of.documents.parts, **sizes, "groups": self._batches.count, "seed": of.seed}
