"""Rows of a fixed length from documents: several documents packed into each row, or one document per row."""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memo.data.resumable_loader import SequenceDataset
from lightning_memo.data.tokenizer import Tokens

IGNORED = -100
"""Label of a token that is no target."""
LEAST_TOKENS = 2
"""Smallest number of tokens in a useful document: one token and the next one to predict."""

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


def best_fit(lengths: Numbers, seq_len: int) -> Pieces:
    """Packs documents into rows of `seq_len` tokens by best fit, longest documents first.

    Documents longer than a row are split into pieces of `seq_len` tokens and a remainder. A remainder of one token is
    dropped. No other document is split. ("Fewer Truncations Improve Language Modeling", Ding et al. 2024, section 3.)

    Args:
        lengths: Number of tokens in each document.
        seq_len: Number of tokens in a row.
    """
    counts = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(document)) - np.repeat(counts.cumsum() - counts, counts)
    start = nth * seq_len
    stop = np.minimum(start + seq_len, lengths[document])
    longest_first = np.argsort(start - stop, kind="stable")
    order = longest_first[(stop - start)[longest_first] >= LEAST_TOKENS]
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


class DocumentRows(SequenceDataset):
    """Rows of `[seq_len]` tokens made of documents.

    Args:
        documents: Records with the `ids` of each document, by number.
        lengths: Number of tokens in each document.
        seq_len: Number of tokens in a row.
        pad_id: Id that fills the rest of a row.

    Attributes:
        tokens: Number of document tokens in all rows.
    """

    tokens: int

    def __init__(self, documents: Any, lengths: Numbers, seq_len: int, pad_id: int) -> None:
        self._documents, self._seq_len, self._pad_id = documents, seq_len, pad_id


class PackedRows(DocumentRows):
    """Rows of several documents: `{"input_ids", "labels", "position_ids"}`; see `DocumentRows`.

    Positions restart at 0 in each document, by which transformers models recognize packed documents. The rest of a row
    is another document without labels. The first token of a document is never a target.
    """

    def __init__(self, documents: Any, lengths: Numbers, seq_len: int, pad_id: int) -> None:
        super().__init__(documents, lengths, seq_len, pad_id)
        self._pieces = best_fit(lengths, seq_len)
        self.tokens = int((self._pieces.stop - self._pieces.start).sum())
        self._edges = np.flatnonzero(np.diff(self._pieces.row, prepend=-1, append=-1))
        self.costs = self._costs()

    @override
    def __len__(self) -> int:
        return len(self._edges) - 1

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        p = self._pieces
        whole = [
            self._documents[int(p.document[n])]["ids"][p.start[n] : p.stop[n]]
            for n in range(self._edges[index], self._edges[index + 1])
        ]
        return packed_row(whole, self._seq_len, self._pad_id)

    def _costs(self) -> npt.NDArray[np.float64]:
        """Returns the squared lengths of the documents of each row, to which the time of attention is proportional."""
        tokens = (self._pieces.stop - self._pieces.start).astype(np.float64)
        if not len(tokens):
            return tokens
        of_row = functools.partial(np.add.reduceat, indices=self._edges[:-1])
        squares: npt.NDArray[np.float64] = of_row(tokens**2) + (self._seq_len - of_row(tokens)) ** 2
        return squares


def packed_row(documents: Sequence[Tokens], seq_len: int, pad_id: int) -> dict[str, Tensor]:
    """Returns one row of `PackedRows`."""
    ids = torch.full((seq_len,), pad_id)
    labels = torch.full((seq_len,), IGNORED)
    edges = np.cumsum([0, *map(len, documents)]).tolist()
    for document, (start, stop) in zip(documents, pairwise(edges), strict=True):
        ids[start:stop] = torch.from_numpy(np.asarray(document))
        labels[start + 1 : stop] = ids[start + 1 : stop]
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise([*edges, seq_len])])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


class PaddedRows(DocumentRows):
    """Rows of one document: `{"input_ids", "labels", "attention_mask"}`; see `DocumentRows`.

    Longer documents are truncated. Shorter ones are padded on the right.
    """

    def __init__(self, documents: Any, lengths: Numbers, seq_len: int, pad_id: int) -> None:
        super().__init__(documents, lengths, seq_len, pad_id)
        self.tokens = int(np.minimum(lengths, seq_len).sum())

    @override
    def __len__(self) -> int:
        return len(self._documents)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        document = torch.from_numpy(np.asarray(self._documents[index]["ids"][: self._seq_len])).long()
        seen = torch.arange(self._seq_len) < len(document)
        ids = torch.full((self._seq_len,), self._pad_id)
        ids[: len(document)] = document
        return {"input_ids": ids, "labels": ids.masked_fill(~seen, IGNORED), "attention_mask": seen.long()}
