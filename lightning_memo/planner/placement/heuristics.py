"""One-pass placements in many orders: on traces of training steps, one of them nearly always meets the lower bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_memo.planner.placement.placement_core import NativeCore, PythonCore, Ranks
from lightning_memo.planner.placement.sections import Sectioned
from lightning_memo.utils.arrays import Integers

# Letters of an order: Z size, W width in time (duration), A area, T largest load met (contention), S start.
ORDERS: Final = ("Z", "A", "W", "S", "WAT", "TAW", "TWA", "TZ")


def ranks(problem: Sectioned, order: str) -> Ranks:
    """[buffers] The place of each buffer in an order: largest first by the first letter, ties by the next."""
    keys: dict[str, npt.NDArray[Any]] = {
        "Z": -problem.size,
        "W": -problem.duration,
        "A": -problem.size.astype(np.float64) * problem.duration,
        "T": -problem.contention,
        "S": problem.ranges[:, 0],
    }
    letters = [*order, *(letter for letter in "ZW" if letter not in order)]
    return rank_of(np.lexsort(tuple(keys[letter] for letter in reversed(letters))))


def rank_of(order: Integers | Ranks) -> Ranks:
    """[buffers] The inverse of an order."""
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


def placements(problem: Sectioned, core: NativeCore | PythonCore) -> Iterator[tuple[str, Integers]]:
    """The name and the offsets, in units, of one placement after another."""
    for order in ORDERS:
        rank = ranks(problem, order)
        buffers = rank_of(rank)
        yield f"{order} first fit", core.fit(buffers, tightest=False)
        yield f"{order} best fit", core.fit(buffers, tightest=True)
        yield f"{order} skyline", core.skyline(rank)
