"""One-pass placements and tree search in C++; without a compiler, one-pass placements in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightning_memo.planner.placement.problem import SectionedProblem
from lightning_memo.utils import native_build as native
from lightning_memo.utils.array_types import Integers

Ranks = npt.NDArray[np.int32]
_SOURCE = Path(__file__).parent / "csrc" / "placement.cpp"
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_FUNCTIONS: dict[str, native.Signature] = {
    "placement_new": (_POINTER, _INT32, _INT32, _POINTER),
    "placement_delete": (None, _POINTER),
    "placement_fit": (_INT64, _POINTER, _POINTER, _POINTER, _INT32, _POINTER),
    "placement_skyline": (_INT64, _POINTER, _POINTER, _POINTER, _POINTER),
    "placement_search": (
        _INT32,
        _POINTER,
        _POINTER,
        _INT64,
        _POINTER,
        _INT64,
        ctypes.c_double,
        _POINTER,
        _POINTER,
    ),
}


class SearchOutcome(IntEnum):
    """Result of a search."""

    INFEASIBLE = 0
    FOUND = 1
    INTERRUPTED = 2


class Core(Protocol):
    """Places the buffers of one problem. Offsets and capacities are in the problem's units."""

    def fit(self, order: Ranks, tightest: bool) -> Integers:
        """Place the buffers in order, each in the first (or the tightest) gap that is large enough."""

    def skyline(self, rank: Ranks) -> Integers:
        """Repeatedly place the buffer that can lie lowest; ties are broken by rank."""


class NativeCore:
    """The C++ core.

    Args:
        problem: Buffers whose sizes are all above 0.
        library: The library that `load_library` returns.
        handle: The problem in the library.
    """

    def __init__(self, problem: SectionedProblem, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._size = problem.size
        self._library, self._handle = library, handle

    def fit(self, order: Ranks, tightest: bool) -> Integers:
        offset = np.empty_like(self._size)
        self._library.placement_fit(self._handle, _at(self._size), _at(order), int(tightest), _at(offset))
        return offset

    def skyline(self, rank: Ranks) -> Integers:
        offset = np.empty_like(self._size)
        self._library.placement_skyline(self._handle, _at(self._size), _at(rank), _at(offset))
        return offset

    def search(
        self, capacity: int, rank: Ranks, nodes: int, seconds: float, weight: Integers
    ) -> tuple[SearchOutcome, Integers]:
        """Search for a placement whose peak is at most `capacity`.

        Args:
            capacity: Maximum peak in units, at least the largest size.
            rank: [buffers] Among buffers that can lie equally low, the one with the lowest rank is tried first.
            nodes: Maximum number of nodes to visit.
            seconds: Maximum time to search.
            weight: [buffers] Increased in place for buffers that prevented a placement.

        Returns:
            The result, and offsets if a placement was found. INFEASIBLE is a proof that there is none.
        """
        offset = np.zeros_like(self._size)
        outcome = self._library.placement_search(
            self._handle, _at(self._size), capacity, _at(rank), nodes, seconds, _at(offset), _at(weight)
        )
        return SearchOutcome(outcome), offset


class PythonCore:
    """The same one-pass placements in Python, which are slow for more than some hundred buffers."""

    def __init__(self, problem: SectionedProblem) -> None:
        self._size: list[int] = problem.size.tolist()
        self._neighbours = _neighbours(problem)

    def fit(self, order: Ranks, tightest: bool) -> Integers:
        offset = [-1] * len(self._size)
        for buffer in order.tolist():
            taken = sorted((offset[n], offset[n] + self._size[n]) for n in self._neighbours[buffer] if offset[n] >= 0)
            end, gaps = 0, []
            for first, last in taken:
                if first - end >= self._size[buffer]:
                    gaps.append((first - end if tightest else 0, end))
                end = max(end, last)
            offset[buffer] = min(gaps)[1] if gaps else end
        return np.array(offset, np.int64)

    def skyline(self, rank: Ranks) -> Integers:
        ranks = rank.tolist()
        offset, lowest = [-1] * len(ranks), [0] * len(ranks)
        waiting = [(0, ranks[buffer], buffer) for buffer in range(len(ranks))]
        heapify(waiting)
        while waiting:
            at, _, buffer = heappop(waiting)
            if offset[buffer] >= 0 or at != lowest[buffer]:
                continue
            offset[buffer], top = at, at + self._size[buffer]
            for other in self._neighbours[buffer]:
                if offset[other] < 0 and lowest[other] < top:
                    lowest[other] = top
                    heappush(waiting, (top, ranks[other], other))
        return np.array(offset, np.int64)


def available_library() -> ctypes.CDLL | None:
    """The library of the C++ core; None if C++ cannot be compiled."""
    try:
        return load_library()
    except native.BuildError:
        return None


@contextmanager
def opened(problem: SectionedProblem, library: ctypes.CDLL | None) -> Iterator[NativeCore | PythonCore]:
    """Provide a core for a problem.

    Args:
        problem: Buffers whose sizes are all above 0.
        library: Library of the C++ core; None to use Python.
    """
    if library is None:
        yield PythonCore(problem)
        return
    handle = library.placement_new(len(problem.size), problem.sections, _at(problem.ranges))
    try:
        yield NativeCore(problem, library, ctypes.c_void_p(handle))
    finally:
        library.placement_delete(ctypes.c_void_p(handle))


@cache
def load_library() -> ctypes.CDLL:
    """Load the library of the C++ core, which is compiled on first use.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    return native.load("placement", [_SOURCE], _FUNCTIONS)


def _at(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _neighbours(problem: SectionedProblem) -> list[list[int]]:
    found: list[set[int]] = [set() for _ in problem.size]
    for section in range(problem.sections):
        live = problem.live(section).tolist()
        for buffer in live:
            found[buffer].update(live)
    return [sorted(others - {buffer}) for buffer, others in enumerate(found)]
