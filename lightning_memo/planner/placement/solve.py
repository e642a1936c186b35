"""Solves a placement problem: one-pass placements, then tree search, then HiGHS, until the peak is proven minimal."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lightning_memo.planner.placement import mip
from lightning_memo.planner.placement.placement_core import (
    NativeCore,
    PythonCore,
    Ranks,
    SearchOutcome,
    available_library,
    opened,
)
from lightning_memo.planner.placement.problem import (
    Placement,
    Problem,
    SectionedProblem,
    independent_groups,
    peak_bytes,
    section,
    validate,
)
from lightning_memo.utils.array_types import Integers

MOST_SEARCHED: Final = 5000
"""Groups with more buffers are not searched, because the time of a node is proportional to their number."""

_FIRST_NODES: Final = 2000
_NODES_BEFORE_MIP: Final = 16000
_SECONDS_BETWEEN_REPORTS: Final = 0.1
_SECONDS_AFTER_FIT: Final = 1.0
_SEARCH_ORDERS: Final = ("TWA", "TAW", "WAT")
_RESTARTED_ORDERS: Final = ("TWA", "A", "Z")
_LEARNED_STEPS: Final = 4
_RESTART_NODES: Final = 500
# The result of a search depends on its first decisions, so many short searches find more than a long one.
_SHUFFLE: Final = 0.1
_MIP_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the solver."""

    stage: str
    peak_bytes: int
    lower_bound_bytes: int
    seconds: float


class _Clock:
    """Measures the elapsed and the remaining time."""

    def __init__(self, seconds: float) -> None:
        self._start = time.perf_counter()
        self._end = self._start + seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def shorten(self, seconds: float) -> None:
        """Reduce the remaining time to at most this many seconds."""
        self._end = min(self._end, time.perf_counter() + seconds)


@dataclass(slots=True, eq=False)
class _Group:
    """Buffers that are never alive with those of other groups, and their best placement, in units of the group."""

    buffers: Integers
    problem: SectionedProblem
    core: NativeCore | PythonCore
    offset: Integers = field(init=False)
    peak: int = field(init=False)
    bound: int = field(init=False)
    weight: dict[str, Integers] = field(default_factory=dict)
    """[buffers] For each order, how often each buffer prevented a placement."""

    method: str = ""

    def __post_init__(self) -> None:
        self.offset = np.concatenate([[0], np.cumsum(self.problem.size)[:-1]])
        self.peak = int(self.problem.size.sum())
        self.bound = int(self.problem.load.max())
        self.method = "one after the other"

    @property
    def peak_bytes(self) -> int:
        return self.peak * self.problem.unit_bytes

    @property
    def bound_bytes(self) -> int:
        return self.bound * self.problem.unit_bytes

    def improve(self, offset: Integers, method: str) -> None:
        """Replace the best placement if this one is lower."""
        peak = int((offset + self.problem.size).max())
        if peak < self.peak:
            self.offset, self.peak, self.method = offset, peak, method


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Order and length of one search, and the weights that it updates."""

    rank: Ranks
    nodes: int
    weight: Integers


class _Solver:
    """Improves the groups of a problem until the peak meets the capacity or is proven minimal."""

    def __init__(
        self, groups: list[_Group], capacity_bytes: int | None, clock: _Clock, show: Callable[[Progress], None]
    ) -> None:
        self._groups, self._capacity, self._clock, self._show = groups, capacity_bytes, clock, show
        self._shown_seconds = -1.0
        self._restart = 0
        self._random = np.random.default_rng(0)  # results are reproducible

    @property
    def peak_bytes(self) -> int:
        return max(group.peak_bytes for group in self._groups)

    @property
    def bound_bytes(self) -> int:
        return max(group.bound_bytes for group in self._groups)

    @property
    def method(self) -> str:
        return max(self._groups, key=lambda group: group.peak_bytes).method

    def run(self) -> None:
        bound = self.bound_bytes
        for group in self._groups:
            self._one_pass(group, bound)
        self._report("one-pass placements")
        searched = [g for g in self._groups if isinstance(g.core, NativeCore) and len(g.buffers) <= MOST_SEARCHED]
        nodes = _FIRST_NODES
        while self._clock.left > 0 and (wanting := self._wanting(searched)):
            for group in wanting:
                self._search(group, nodes)
            nodes *= 2
            if nodes == _NODES_BEFORE_MIP:
                self._solve_programs(self._wanting(searched))
        self._solve_programs([group for group in self._wanting(self._groups) if group not in searched])

    def _report(self, stage: str) -> None:
        self._shown_seconds = self._clock.elapsed
        self._show(Progress(stage, self.peak_bytes, self.bound_bytes, self._clock.elapsed))
        if self._capacity is not None and self.bound_bytes <= self.peak_bytes <= self._capacity:
            self._clock.shorten(_SECONDS_AFTER_FIT)

    def _wanting(self, groups: list[_Group]) -> list[_Group]:
        """Groups with a peak above the lower bound of the problem, the highest first."""
        bound = self.bound_bytes
        return sorted((g for g in groups if g.peak_bytes > bound), key=lambda g: -g.peak_bytes)

    def _one_pass(self, group: _Group, bound_bytes: int) -> None:
        """Try one-pass placements, at least one of them regardless of the time."""
        if group.peak_bytes <= bound_bytes:
            return
        for name, offset in mip.placements(group.problem, group.core):
            group.improve(offset, name)
            if self._clock.elapsed > self._shown_seconds + _SECONDS_BETWEEN_REPORTS:
                self._report("one-pass placements")
            if group.peak_bytes <= bound_bytes or self._clock.left <= 0:
                return

    # ---- search

    def _search(self, group: _Group, nodes: int) -> None:
        """Search for every target peak in every order."""
        for attempt in self._orders(group, nodes):
            for target in self._targets(group):
                if not group.bound <= target < group.peak:
                    continue
                self._try(group, target, attempt)
                self._report("search")
                if self._clock.left <= 0 or group.peak_bytes <= self.bound_bytes:
                    return

    def _orders(self, group: _Group, nodes: int) -> Iterator[_Attempt]:
        ranks = {order: mip.ranks(group.problem, order) for order in (*_SEARCH_ORDERS, *_RESTARTED_ORDERS)}
        for order in _SEARCH_ORDERS:
            yield _Attempt(ranks[order], nodes, np.zeros_like(group.offset))
        for order in _RESTARTED_ORDERS:
            weight = group.weight.setdefault(order, np.zeros_like(group.offset))
            for _ in range(_LEARNED_STEPS):
                # Buffers that prevented earlier placements come first.
                rank = mip.rank_of(np.lexsort((ranks[order], -weight)))
                yield _Attempt(rank, nodes // _LEARNED_STEPS, weight)
            for budget in self._restarts(nodes):
                noise = self._random.normal(0, _SHUFFLE * len(ranks[order]), len(ranks[order]))
                rank = mip.rank_of(np.argsort(ranks[order] + noise))
                yield _Attempt(rank, budget, np.zeros_like(group.offset))

    def _restarts(self, nodes: int) -> Iterator[int]:
        """Node limits of short searches by the sequence of Luby, Sinclair and Zuckerman: 1, 1, 2, 1, 1, 2, 4, 1, ..."""
        while nodes > 0:
            self._restart += 1
            budget = _RESTART_NODES * _luby(self._restart)
            nodes -= budget
            yield budget

    def _targets(self, group: _Group) -> list[int]:
        """Peaks to search for, the lowest first."""
        low = max(group.bound, -(-self.bound_bytes // group.problem.unit_bytes))
        capacity = None if self._capacity is None else self._capacity // group.problem.unit_bytes
        if capacity is not None and low <= capacity < group.peak:
            # Some targets exceed the capacity: a placement that does not fit may still be lower than the best one.
            return sorted({low, (low + capacity) // 2, capacity, (capacity + group.peak) // 2})
        room = group.peak - low
        return sorted({low, low + room // 4, low + room // 2, group.peak - 1})

    def _try(self, group: _Group, target: int, attempt: _Attempt) -> None:
        assert isinstance(group.core, NativeCore)
        seconds = max(self._clock.left, 0.0)
        outcome, offset = group.core.search(target, attempt.rank, attempt.nodes, seconds, attempt.weight)
        if outcome is SearchOutcome.FOUND:
            group.improve(offset, "search")
        elif outcome is SearchOutcome.INFEASIBLE:
            group.bound = target + 1

    # ---- HiGHS

    def _solve_programs(self, groups: list[_Group]) -> None:
        """Solve the groups that are small enough with HiGHS."""
        for group in groups:
            if self._clock.left <= 0 or len(group.buffers) > 300 or len(mip.pairs(group.problem)) > mip.MOST_PAIRS:
                continue
            seconds = _MIP_SHARE * max(self._clock.left, 0.0)
            offset, group.bound = mip.improve(group.problem, group.offset, group.bound, seconds)
            if offset is not None:
                group.improve(offset, "HiGHS")
            self._report("HiGHS")


def _luby(number: int) -> int:
    power = number.bit_length()
    return 2 ** (power - 1) if number == 2**power - 1 else _luby(number - 2 ** (power - 1) + 1)


def place(
    problem: Problem,
    *,
    capacity_bytes: int | None = None,
    time_limit_seconds: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
) -> Placement:
    """Find offsets with a low peak.

    Args:
        problem: The buffers.
        capacity_bytes: Peak that is low enough; None to search for the lowest one.
        time_limit_seconds: Maximum time to search. The search ends earlier if the peak is proven to be minimal.
        progress: Called from time to time.

    Returns:
        The best placement that was found, after validation.

    Raises:
        RuntimeError: The placement is invalid, which is a bug.
    """
    library = available_library()
    clock = _Clock(time_limit_seconds)  # started after compiling the library, which happens once per machine
    with ExitStack() as stack:
        groups = [_Group(*group) for group in _open_groups(problem, library, stack)]
        # The group with the largest load comes first: the others do not have to be lower.
        groups.sort(key=lambda group: -group.bound_bytes)
        solver = _Solver(groups, capacity_bytes, clock, progress or (lambda _: None)) if groups else None
        if solver is not None:
            solver.run()
    offset = np.zeros(len(problem), np.int64)
    for group in groups:
        offset[group.buffers] = group.offset * group.problem.unit_bytes
    placement = Placement(
        offset=offset,
        peak_bytes=peak_bytes(problem, offset),
        lower_bound_bytes=solver.bound_bytes if solver else 0,
        method=solver.method if solver else "nothing to place",
        seconds=clock.elapsed,
    )
    findings = validate(problem, placement)
    if findings:
        raise RuntimeError(f"a placement is invalid, please report this bug: {findings[0]}")
    return placement


def _open_groups(
    problem: Problem, library: ctypes.CDLL | None, stack: ExitStack
) -> Iterator[tuple[Integers, SectionedProblem, NativeCore | PythonCore]]:
    """Yield buffers, problem and core of each group of buffers with a size above 0; the stack closes the cores."""
    solid = np.nonzero(problem.size > 0)[0]
    for buffers in independent_groups(problem.subset(solid)):
        sectioned = section(problem.subset(solid[buffers]))
        yield solid[buffers], sectioned, stack.enter_context(opened(sectioned, library))
