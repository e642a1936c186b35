"""Where the tokens of a batch are: which process holds which positions, and in which order.

Two orders meet on every process of a context-parallel group. In *layer order* attention sees its tokens: zigzag over
ring processes, so that causal work is even, then contiguous over all-to-all processes. In *fed order* the model gets
them: under sequence parallelism each shard must hold its part of every slice, so that gathering a slice from all shards
gives a contiguous range of the layer order. Where attention runs slice after slice, each slice is a range of the whole
sequence and divided by itself, so that the earlier slices are the past of all processes. All permuting happens once, on
the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


def multiple(ring: int, ulysses: int, shards: int) -> int:
    """What the padded length must divide by: ring processes hold two chunks each, every shard as many tokens."""
    return ring * math.lcm(2 if ring > 1 else 1, ulysses * shards)


def slice_multiple(ring: int, ulysses: int, shards: int) -> int:
    """What the tokens of a shard in one slice must divide by, where every slice is divided over all processes."""
    return multiple(ring, ulysses, shards) // (ring * ulysses * shards)


def zigzag(section: range, ring: int, ring_rank: int) -> tuple[range, ...]:
    """Positions of a section that a ring rank holds, all its all-to-all processes together: head and tail, or all."""
    if ring == 1:
        return (section,)
    size = len(section) // (2 * ring)
    head, tail = section.start + ring_rank * size, section.start + (2 * ring - 1 - ring_rank) * size
    return range(head, head + size), range(tail, tail + size)


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The tokens of one process; context rank is `ring_rank * ulysses + ulysses_rank`.

    Attributes:
        tokens: Length of the whole, padded sequence.
        ring: Processes of a ring (the outer ones), and which of them this is.
        ulysses: Processes that exchange heads and tokens all-to-all (the inner ones), and which of them this is.
        shards: Sequence-parallel shards: the tensor-parallel size under sequence parallelism, else 1.
        bounds: Where slices end on one shard, the last at `tokens / ring / ulysses / shards`; empty is one slice.
        outside: Whether a slice is a range of the whole sequence, divided over the context-parallel processes; else
            each of them cuts its own tokens.
        documents: Of each batch row the positions at which documents start, the first at 0; `None`: one document a row.
        lengths: Valid tokens of each batch row (right padding); `None` when all are.
        largest_position: Of the batch, padding aside, by which some rotary frequencies go; `None`: `tokens - 1`.

    Raises:
        ValueError: Numbers that do not go together; the text names them.
    """

    tokens: int
    ring: int = 1
    ring_rank: int = 0
    ulysses: int = 1
    ulysses_rank: int = 0
    shards: int = 1
    bounds: tuple[int, ...] = ()
    outside: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None
    lengths: tuple[int, ...] | None = None
    largest_position: int | None = None

    def __post_init__(self) -> None:
        self._check_ranks()
        self._check_bounds()
        self._check_rows()

    @property
    def local_tokens(self) -> int:
        """Tokens of this context rank, all its shards together."""
        return self.tokens // (self.ring * self.ulysses)

    @property
    def sections(self) -> tuple[range, ...]:
        """Positions that are divided over the context-parallel processes one section after the other."""
        if not (self.outside and self.bounds):
            return (range(self.tokens),)
        parts = self.ring * self.ulysses * self.shards
        return tuple(range(a * parts, b * parts) for a, b in pairwise((0, *self.bounds)))

    def layer_order(self) -> Tensor:
        """Positions of this context rank's tokens as attention sees them, int64 `[local_tokens]`."""
        return torch.cat([self._own_part(section) for section in self.sections])

    def _own_part(self, section: range) -> Tensor:
        chunks = zigzag(section, self.ring, self.ring_rank)
        return torch.cat([torch.arange(c.start, c.stop) for c in chunks]).chunk(self.ulysses)[self.ulysses_rank]

    def fed_order(self) -> Tensor:
        """Positions of this context rank's tokens as the model gets them, int64 `[local_tokens]`.

        Shard `t` is the `t`-th contiguous part of `1 / shards`. Its tokens `[a, b)` of one slice, put behind those of
        the shards before it, are the tokens `[shards * a, shards * b)` of the layer order.
        """
        layer = self.layer_order()
        edges = (0, *(self.bounds or (self.local_tokens // self.shards,)))
        slices = [layer[self.shards * a : self.shards * b].chunk(self.shards) for a, b in pairwise(edges)]
        return torch.cat([parts[shard] for shard in range(self.shards) for parts in slices])

    def _check_ranks(self) -> None:
        for name, size, rank in (
            ("ring", self.ring, self.ring_rank),
            ("ulysses", self.ulysses, self.ulysses_rank),
            ("shards", self.shards, 0),
        ):
            if size < 1 or not 0 <= rank < size:
                raise ValueError(f"{name} has {size} processes and rank {rank}: ranks count from 0, and must be fewer")
        needed = multiple(self.ring, self.ulysses, self.shards)
        if self.tokens < 1 or self.tokens % needed:
            raise ValueError(
                f"{self.tokens} tokens over ring {self.ring}, ulysses {self.ulysses} and {self.shards} shards: "
                f"pad to a multiple of {needed}"
            )

    def _check_bounds(self) -> None:
        if not self.bounds:
            return
        last = self.local_tokens // self.shards
        if self.bounds[-1] != last or not all(a < b for a, b in pairwise((0, *self.bounds))):
            raise ValueError(f"slice bounds {self.bounds} must increase from above 0 to {last}, the tokens of a shard")
        needed = slice_multiple(self.ring, self.ulysses, self.shards)
        if self.outside and any(bound % needed for bound in self.bounds):
            raise ValueError(f"slice bounds {self.bounds} of a ring must be multiples of {needed}")

    def _check_rows(self) -> None:
        for starts in self.documents or ():
            if not starts or starts[0] != 0 or starts[-1] >= self.tokens or not all(a < b for a, b in pairwise(starts)):
                raise ValueError(f"documents at {starts} must start at 0 and increase to below {self.tokens} tokens")
        for length in self.lengths or ():
            if not 0 <= length <= self.tokens:
                raise ValueError(f"a row of {length} valid tokens does not fit in {self.tokens} tokens")
        if self.documents is not None and self.lengths is not None and len(self.documents) != len(self.lengths):
            raise ValueError(f"documents of {len(self.documents)} batch rows, but lengths of {len(self.lengths)}")
