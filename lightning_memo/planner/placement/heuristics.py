"""One-pass placements in many orders. On traces of training steps, one of them nearly always meets the lower bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_memo.planner.placement.placement_core import NativeCore, PythonCore, Ranks
from lightning_memo.planner.placement.time_sections import SectionedProblem
from lightning_memo.utils.array_types import Integers

# Sort keys by letter: Z size, W width in time (duration), A area, T largest load during the life (contention), S start.
ORDERS: Final = ("Z", "A", "W", "S", "WAT", "TAW", "TWA", "TZ")


def ranks(problem: SectionedProblem, order: str) -> Ranks:
    """[buffers] Rank of each buffer.

    Args:
        problem: The buffers.
        order: Letters of the sort keys. The largest buffer by the first key has rank 0; the next keys break ties.
    """
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
    """[buffers] Inverse of a permutation of the buffers."""
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


def placements(problem: SectionedProblem, core: NativeCore | PythonCore) -> Iterator[tuple[str, Integers]]:
    """Yield the name and the offsets of one placement after another.

    Args:
        problem: The buffers.
        core: Places them; offsets are in units of `problem`.
    """
    for order in ORDERS:
        rank = ranks(problem, order)
        buffers = rank_of(rank)
        yield f"{order} first fit", core.fit(buffers, tightest=False)
        yield f"{order} best fit", core.fit(buffers, tightest=True)
        yield f"{order} skyline", core.skyline(rank)
