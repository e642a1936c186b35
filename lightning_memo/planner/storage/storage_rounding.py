"""Rounds shares of the tokens to ranges of whole tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.storage_plan import CallPlan, StoredRange
from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, INPUT, PLACES, CallCosts, Place
from lightning_memo.planner.storage.storage_program import Shares, StorageSolution

# A tile is stored if at most this part of it is missing: rounding up, to the nearest, and down. Rounding down tolerates
# a small part because the solver reaches whole tiles only within its tolerance.
_MISSING: Final = (0.999, 0.5, 0.001)
_NOTHING: Final = 1e-7


def roundings(
    calls: Sequence[CallCosts], solution: StorageSolution, tokens: int, tile: int, product_tile: int
) -> Iterator[tuple[CallPlan, ...]]:
    """Round shares of the tokens to ranges that begin at multiples of a tile, in several ways.

    Args:
        calls: Classes of layer calls.
        solution: Shares of each class.
        tokens: Tokens of a layer call.
        tile: Tokens of a tile of layer inputs and attention outputs.
        product_tile: Tokens of a tile of all other kinds.

    Yields:
        Plans of all classes. The last ones store no more than the shares, except for kinds that must be stored.
    """
    for missing in _MISSING:
        for spare in (*PLACES, None):
            tilings = [
                _Tiling(shares, tokens, tile, product_tile, solution.required, missing, spare)
                for shares in solution.shares
            ]
            yield tuple(tiling.plan(call) for call, tiling in zip(calls, tilings, strict=True))


@dataclass(frozen=True, slots=True)
class _Tiling:
    """One way to round: each share is rounded, and so is their sum over the places, which can be larger."""

    shares: Shares
    tokens: int
    tile: int
    product_tile: int
    required: Sequence[str]
    missing: float
    spare: Place | None  # gets the tokens by which the rounded sum is larger

    def plan(self, call: CallCosts) -> CallPlan:
        """Ranges of all kinds. Attention is dropped for the first tokens, so kinds that need it lie at the end."""
        given = {kind: self._lay(kind, self.tokens) for kind in (INPUT, ATTENTION)}
        whole = self._lay(ALL, self.tokens, self._first(given[ATTENTION]))
        rest = [self._lay(product.name, self._first(whole)) for product in call.products]
        return CallPlan(ranges=tuple(r for ranges in (*given.values(), whole, *rest) for r in ranges))

    def _first(self, ranges: Sequence[StoredRange]) -> int:
        return min((r.start for r in ranges), default=self.tokens)

    def _lay(self, kind: str, stop: int, lowest: int = 0) -> list[StoredRange]:
        """Ranges of a kind that end at `stop`; none begins before `lowest`."""
        ranges = []
        for place, length in self._lengths(kind, stop, lowest).items():
            if length:
                ranges.append(StoredRange(kind=kind, place=place, start=stop - length, stop=stop))
                stop -= length
        return ranges[::-1]

    def _lengths(self, kind: str, stop: int, lowest: int) -> dict[Place, int]:
        shares = {place: share for place in reversed(PLACES) if (share := self.shares[kind, place]) > _NOTHING}
        if not shares:
            return {}
        first = 0 if kind in self.required else self._start(kind, stop, sum(shares.values()), lowest)
        lengths, start = {}, stop
        for place, share in shares.items():
            lengths[place] = start - max(self._start(kind, start, share, lowest), first)
            start -= lengths[place]
        taker = self.spare if self.spare in shares else max(shares, key=lambda place: shares[place])
        if taker == self.spare or kind in self.required:
            lengths[taker] += start - first
        return lengths

    def _start(self, kind: str, stop: int, share: float, lowest: int) -> int:
        tile = self.tile if kind in (INPUT, ATTENTION) else self.product_tile
        tiles = math.ceil((stop - share * self.tokens) / tile - self.missing)
        return min(max(tiles * tile, lowest), stop)
