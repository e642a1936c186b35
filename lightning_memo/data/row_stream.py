"""Endless stream of rows whose documents are tokenized and packed during training, with resumable positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from typing_extensions import override

from lightning_memo.data.document_stream import DocumentReader, DocumentStream, Place
from lightning_memo.data.packing import LEAST_TOKENS, DocumentRows
from lightning_memo.data.resumable_loader import end_with_parent
from lightning_memo.data.tokenizer import Tokenizer, Tokens
from lightning_memo.parallel.run_on_ranks import gather

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


@dataclass(frozen=True, kw_only=True)
class RowStream:
    """Endless rows of documents that are packed block by block.

    Attributes:
        documents: Documents to read.
        start: Position of the first training document. Earlier documents are for validation.
        tokenizer: Tokenizer of the documents.
        rows_of: Makes rows from a block.
        block_tokens: Number of tokens at which a block of documents is complete.
        seed: Seed of the order of the rows in a block.
    """

    documents: DocumentStream
    start: Place
    tokenizer: Tokenizer
    rows_of: Callable[[list[Document]], DocumentRows]
    block_tokens: int
    seed: int

    def rows(self, place: Place | None, rank: int, count: int) -> Iterator[tuple[Place, Batch]]:
        """Yields rows of every `count`-th document, each with the position after it. The stream repeats at the end.

        A position is the position of a block of documents and the number of its rows already returned. Resuming reads
        the block again.

        Args:
            place: Position to start from; None for the beginning.
            rank: Data-parallel rank, which selects the documents.
            count: Data-parallel size.

        Raises:
            ValueError: A document cannot be read, or there is no document for this rank.
        """
        place = place or self._begin(0)
        while True:
            reader, block, given = DocumentReader(self.documents, place["block"]), place["block"], place["given"]
            rows = self._next_rows(reader, rank, count)
            if not rows:
                raise ValueError(
                    f"path={self.documents.path}: no document is left for data-parallel group {rank + 1} of"
                    f" {count}; give more documents, or lower val_documents"
                )
            while rows:
                order = np.random.default_rng((self.seed, place["round"], block["number"])).permutation(len(rows))
                for n in range(given, len(rows)):
                    yield {"round": place["round"], "block": block, "given": n + 1}, rows[int(order[n])]
                block, given = reader.place(), 0
                rows = self._next_rows(reader, rank, count)
            place = self._begin(place["round"] + 1)

    def _begin(self, number: int) -> Place:
        return {"round": number, "block": self.start, "given": 0}

    def _next_rows(self, reader: DocumentReader, rank: int, count: int) -> DocumentRows | None:
        block = read_block(
            reader,
            self.tokenizer,
            enough=lambda documents, tokens: tokens >= self.block_tokens,
            mine=lambda number: number % count == rank,
        )
        return self.rows_of(block) if block else None


@dataclass
class _Batches(IterableDataset[Any]):
    """Batches of a stream, each with the position after it.

    An error is returned as the last item, because workers would raise it with a traceback.
    """

    stream: RowStream
    batch_size: int
    rank: int
    count: int
    place: Place | None = None

    @override
    def __iter__(self) -> Iterator[Any]:
        batch: list[Batch] = []
        try:
            for place, row in self.stream.rows(self.place, self.rank, self.count):
                batch.append(row)
                if len(batch) == self.batch_size:
                    yield place, default_collate(batch)
                    batch = []
        except ValueError as error:
            yield error


class StreamLoader:
    """Loads batches of a stream. Lightning's checkpoints save the position, and a run is a single epoch.

    Args:
        stream: Stream to load.
        batch_size: Number of rows per batch.
        batches: Length of an epoch for Lightning.
        num_workers: 0, or 1 for a process that reads ahead.
        rank: Data-parallel rank of this process.
        count: Data-parallel size. Each rank gets its own documents.
        unfinished: As in `lightning_memo.data.resumable_loader.ResumableLoader`.
    """

    def __init__(
        self,
        stream: RowStream,
        batch_size: int,
        batches: int,
        num_workers: int,
        rank: int,
        count: int,
        unfinished: Callable[[], int],
    ) -> None:
        self._batches = _Batches(stream, batch_size, rank, count)
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

    def _identity(self) -> dict[str, int]:
        of = self._batches.stream
        sizes = {"block_tokens": of.block_tokens, "batch_size": self._batches.batch_size}
        return {"files": len(of.documents.files), **sizes, "groups": self._batches.count, "seed": of.seed}
