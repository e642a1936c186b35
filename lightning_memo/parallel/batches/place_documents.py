"""Which documents of a batch the processes of a context-parallel group divide, and which each of them has whole.

Note: [Documents of different lengths]
The attention of a short document takes less time than its keys and values take to travel. The longest documents of a
batch are therefore divided over all processes, and each of the others lies whole on one process, which needs nothing
from the others to attend to it. Padding of rows is left out. All processes have equally many tokens: padding follows
the documents of those that have fewer.

Attention knows neither rows nor their padding, but one sequence: the documents that are divided, then those of the
first process, then those of the second, and so on. Every process places the documents of a batch by the same rules.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, product

import torch
from torch import Tensor

Documents = tuple[tuple[int, ...], ...]

# Rounded, of a layer of Llama 3 8B on 8 H100, whose products take 1.9 us a token: Ulysses exchanges 40 KB at 360 GB/s
# (a ring sends less, behind attention), and 41 KB are merged at 500 GB/s.
_SENDING = 0.05
"""Time to send a token's keys and values to the next process, relative to that of its products with weights."""
_MERGING = 0.05
"""Time to merge a token's output for the keys of another process, relative to the same."""
_SLACKS = (1 / 64, math.inf)
"""How much more than an even share of the whole documents a process may have."""
_STEPS = 64
"""Steps of a process's share by which numbers of tokens differ, so that few occur: memory is planned for each."""


@dataclass(frozen=True, slots=True)
class DocumentPlacement:
    """Where the documents of a batch are. Documents are ranges of its tokens, whose rows follow one another.

    Attributes:
        rows: Number of rows of the batch.
        row_tokens: Number of tokens of a row.
        shared: The documents that all processes divide.
        whole: The documents of each process, in the order of context-parallel ranks.
        shared_tokens: Number of tokens of the divided documents, with padding.
        whole_tokens: Number of tokens of the documents of a process, with padding.
        documents: Positions in each row at which documents start; `None` for one document per row.
        lengths: Number of valid tokens in each row; `None` if all are valid.
    """

    rows: int
    row_tokens: int
    shared: tuple[range, ...]
    whole: tuple[tuple[range, ...], ...]
    shared_tokens: int
    whole_tokens: int
    documents: Documents | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of all processes, with padding."""
        return self.shared_tokens + len(self.whole) * self.whole_tokens

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions in the sequence of attention at which documents, and the padding behind them, start."""
        found: list[int] = []
        for start, size, documents in self._parts:
            edges = list(accumulate((len(each) for each in documents), initial=start))
            found += edges if edges[-1] < start + size else edges[:-1]
        return tuple(found)

    def sources(self) -> Tensor:
        """Return the token of the batch at each position in the sequence of attention, int64; -1 for padding."""
        return _sources(self)

    @property
    def _parts(self) -> Iterator[tuple[int, int, tuple[range, ...]]]:
        """Start and size of each part of the sequence of attention, and its documents."""
        yield 0, self.shared_tokens, self.shared
        for number, documents in enumerate(self.whole):
            yield self.shared_tokens + number * self.whole_tokens, self.whole_tokens, documents


@functools.lru_cache(maxsize=8)  # every layer of a batch may ask for the same
def _sources(placement: DocumentPlacement) -> Tensor:
    sources = torch.full((placement.tokens,), -1)
    for start, _, documents in placement._parts:
        ends = accumulate((len(each) for each in documents), initial=start)
        for (first, stop), document in zip(pairwise(ends), documents, strict=True):
            sources[first:stop] = torch.arange(document.start, document.stop)
    return sources


def pairs_of_a_token(hidden: int) -> int:
    """Return how many pairs of a query and a key take as long as the products of a token with the weights of a layer.

    A layer has about 12 weights for each pair of features, and attention multiplies vectors of that size twice.

    Args:
        hidden: Size of the hidden states.
    """
    return 6 * hidden


@dataclass(frozen=True, slots=True)
class PlacingCosts:
    """What the time of a batch depends on.

    Attributes:
        ring: Number of ranks in a ring.
        ulysses: Number of ranks that exchange heads and tokens all-to-all.
        multiple: Number that the tokens of all processes must be a multiple of.
        pairs: Number of pairs of a query and a key whose attention takes as long as a token's products with weights.
    """

    ring: int
    ulysses: int
    multiple: int
    pairs: int

    @property
    def processes(self) -> int:
        return self.ring * self.ulysses

    def seconds(self, local: int, shared: int, shared_pairs: float, most_pairs: float) -> float:
        """Return the time of the slowest process, in that of a token's products with weights.

        Args:
            local: Number of tokens of a process.
            shared: Number of tokens that are divided.
            shared_pairs: Pairs of a query and a key of divided documents, of all processes.
            most_pairs: Pairs of a query and a key of the documents that a process has whole.
        """
        divided, attention = shared / self.processes, shared_pairs / self.processes / self.pairs
        sending, merging = (seconds * (self.ring - 1) * divided for seconds in (_SENDING, _MERGING))
        exchanging = _SENDING * divided if self.ulysses > 1 else 0.0
        return local + max(attention, sending) + merging + exchanging + most_pairs / self.pairs


def place_documents(
    rows: int, row_tokens: int, documents: Documents | None, lengths: tuple[int, ...] | None, costs: PlacingCosts
) -> DocumentPlacement | None:
    """Return where the documents of a batch are; `None` if dividing every row is as fast.

    Args:
        rows: Number of rows of the batch.
        row_tokens: Number of tokens of a row.
        documents: Positions in each row at which documents start; `None` for one document per row.
        lengths: Number of valid tokens in each row (right padding); `None` if all are valid.
        costs: What the time depends on.
    """
    found = sorted(_documents_of(rows, row_tokens, documents, lengths), key=len, reverse=True)
    padded = rows * _round_up(row_tokens, costs.multiple)
    least = costs.seconds(padded // costs.processes, padded, sum(map(_pairs, found)), 0.0)
    unit = costs.multiple // costs.processes
    share = sum(map(len, found)) // costs.processes
    step = _round_up(1 << max(share // _STEPS, 1).bit_length() - 1, unit)
    most_local, best = padded // costs.processes + step, None
    for count, slack in product(_counts(len(found)), _SLACKS):
        whole, left, most = _spread(found[count:], costs.processes, slack)
        shared = found[:count] + left
        shared_tokens = _round_up(sum(map(len, shared)), costs.multiple)
        of_shared = shared_tokens // costs.processes
        whole_tokens = _round_up(of_shared + most, step) - of_shared
        if of_shared + whole_tokens > most_local:
            continue
        idle = (whole_tokens - sum(map(len, each)) for each in whole)
        pairs = [sum(map(_pairs, each)) + n * n / 2 for each, n in zip(whole, idle, strict=True)]
        seconds = costs.seconds(of_shared + whole_tokens, shared_tokens, sum(map(_pairs, shared)), max(pairs))
        if seconds < least:
            least = seconds
            in_order = tuple(tuple(sorted(each, key=lambda document: document.start)) for each in (shared, *whole))
            best = DocumentPlacement(
                rows, row_tokens, in_order[0], in_order[1:], shared_tokens, whole_tokens, documents, lengths
            )
    return best


def _documents_of(
    rows: int, row_tokens: int, documents: Documents | None, lengths: tuple[int, ...] | None
) -> list[range]:
    """Return the documents of a batch without padding."""
    ends = (row_tokens,) * rows if lengths is None else lengths
    starts = ((0,),) * rows if documents is None else documents
    of_rows = (
        [range(row * row_tokens + a, row * row_tokens + b) for a, b in pairwise((*firsts, end))]
        for row, (firsts, end) in enumerate(zip(starts, ends, strict=True))
    )
    return list(chain.from_iterable(of_rows))


def _pairs(document: range) -> float:
    """Return the pairs of a query and a key in a document under a causal mask."""
    return len(document) * len(document) / 2


def _counts(documents: int) -> Iterator[int]:
    """Yield numbers of documents to divide: all small ones, some of the large ones, and that of all documents."""
    count = 0
    while count < documents:
        yield count
        count += max(1, count // 4)
    yield documents


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _spread(documents: Sequence[range], processes: int, slack: float) -> tuple[list[list[range]], list[range], int]:
    """Give documents to processes, the longest ones first, each to the process with the fewest tokens.

    Args:
        documents: The documents.
        processes: Number of processes.
        slack: How much more than an even share of the tokens a process may have.

    Returns:
        The documents of each process, those that fit nowhere, and the most tokens of a process.
    """
    capacity = sum(map(len, documents)) / processes * (1 + slack)
    loads = [(0, number) for number in range(processes)]
    parts: list[list[range]] = [[] for _ in range(processes)]
    left = []
    for document in documents:
        tokens, number = loads[0]
        if tokens + len(document) > capacity:
            left.append(document)
            continue
        heapq.heapreplace(loads, (tokens + len(document), number))
        parts[number].append(document)
    return parts, left, max(loads)[0]
