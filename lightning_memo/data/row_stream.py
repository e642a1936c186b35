"""Endless stream of rows whose documents are tokenized and packed during training, with resumable positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from typing_extensions import override

from lightning_memo.data.document_files import DocumentReader, DocumentStream, Place
from lightning_memo.data.loader_workers import end_with_parent
from lightning_memo.data.packing import LEAST_TOKENS, DocumentRows
from lightning_memo.data.resumable_loader import balanced_order
from lightning_memo.data.tokenizer import Tokenizer, Tokens
from lightning_memo.parallel.ranks import gather

Batch = dict[str, Tensor]


class Document(TypedDict):
    """A record for `lightning_memo.data.packing.DocumentRows`."""

    ids: Tokens


def read_block(
    reader: DocumentReader,
    tokenizer: Tokenizer,
    enough: Callable[[int, int], bool],
    mine: Callable[[int], bool] = lambda number: True,
) -> list[Document]:
    """Returns the next tokenized documents of a reader, or an empty list at the end.

    Args:
        reader: Reader, which continues after the last document of the block.
        tokenizer: Tokenizer of the documents.
        enough: Whether a block with a number of documents and a number of tokens is complete.
        mine: Whether the document with a number belongs to the block.
    """
    block: list[Document] = []
    tokens = 0
    for number, text in reader:
        if not mine(number) or len(ids := tokenizer.encode_document(text)) < LEAST_TOKENS:
            continue
        block.append({"ids": ids})
        tokens += len(ids)
        if enough(len(block), tokens):
            break
    return block


@dataclass(frozen=True, slots=True)
class _PackedRow:
    """A row of a block, and its position in the stream."""

    place: Place
    rows: DocumentRows
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
        tokenizer: Tokenizer of the documents.
        rows_of: Makes rows from a block.
        window: Number of rows that are ordered together. A block of documents has about as many.
        seq_len: Number of tokens in a row.
        batch_size: Number of rows in a batch.
        balance: Whether all data-parallel ranks get rows of about the same cost at the same time.
        seed: Seed of the order of the rows in a window.
    """

    documents: DocumentStream
    start: Place
    tokenizer: Tokenizer
    rows_of: Callable[[list[Document]], DocumentRows]
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
        while True:
            rows = self._next_rows(reader, rank, count)
            if not rows and block == self.start:
                raise ValueError(
                    f"path={self.documents.path}: no document is left for data-parallel group {rank + 1} of"
                    f" {count}; give more documents, or lower val_documents"
                )
            if rows:
                for index in range(skip, len(rows)):
                    yield _PackedRow({"round": turn, "block": block, "skip": index}, rows, index)
                block, skip = reader.place(), 0
            else:
                turn, block = turn + 1, self.start
                reader = DocumentReader(self.documents, block)

    def _next_rows(self, reader: DocumentReader, rank: int, count: int) -> DocumentRows | None:
        block = read_block(
            reader,
            self.tokenizer,
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
        return {"files": len(of.documents.files), **sizes, "groups": self._batches.count, "seed": of.seed}
