"""Divides time into sections, and buffers into groups that are never alive together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_memo.planner.placement.problem import Problem
from lightning_memo.utils.array_types import Integers


@dataclass(frozen=True)
class SectionedProblem:
    """A placement problem whose time is reduced to sections, the times at which the set of live buffers is maximal.

    Every other set of live buffers is a subset of one of these. Sizes are in units of their greatest common divisor.
    """

    size: Integers
    """[buffers] Size in units, at least 1."""

    ranges: npt.NDArray[np.int32]
    """[buffers, 4] Two ranges of sections `[first, last)`. The second is empty unless the buffer wraps around."""

    sections: int
    unit_bytes: int
    duration: Integers
    """[buffers] Length of the lifetime, in the problem's unit of time."""

    @cached_property
    def load(self) -> Integers:
        """[sections] Live units."""
        change = np.zeros(self.sections + 1, np.int64)
        for first, last in (self.ranges[:, :2].T, self.ranges[:, 2:].T):
            np.add.at(change, first, self.size)
            np.add.at(change, last, -self.size)
        return np.cumsum(change)[:-1]

    @cached_property
    def contention(self) -> Integers:
        """[buffers] Largest load during the lifetime of each buffer, in units."""
        best = np.zeros(len(self.size), np.int64)
        for first, last in (self.ranges[:, :2].T, self.ranges[:, 2:].T):
            for buffer in np.nonzero(last > first)[0]:
                best[buffer] = max(best[buffer], self.load[first[buffer] : last[buffer]].max())
        return best

    def live(self, section: int) -> Integers:
        """Indices of the buffers that live in a section."""
        first, last, first_again, last_again = self.ranges.T
        inside = ((first <= section) & (section < last)) | ((first_again <= section) & (section < last_again))
        return np.nonzero(inside)[0]


def section(problem: Problem) -> SectionedProblem:
    """Divide the time of a problem into sections.

    Args:
        problem: Buffers whose sizes are all above 0.
    """
    start = np.zeros(int(problem.wraps.any()), np.int64)
    times = np.unique(np.concatenate([problem.lower, problem.upper, start]))
    lower, upper = np.searchsorted(times, problem.lower), np.searchsorted(times, problem.upper)
    wraps = problem.wraps
    maximal = _maximal(lower, upper, wraps, len(times))
    first, last = np.searchsorted(maximal, lower), np.searchsorted(maximal, upper)
    count = len(maximal)
    nothing = np.zeros_like(first)
    ranges = np.stack(
        [first, np.where(wraps, count, last), nothing, np.where(wraps, last, nothing)], axis=1, dtype=np.int32
    )
    empty = ranges[:, 0] == ranges[:, 1]  # the buffer lives only after the end of the step
    ranges[empty] = np.roll(ranges[empty], 2, axis=1)
    period = problem.period or 0
    unit = int(np.gcd.reduce(problem.padded_size)) if len(problem) else 1
    return SectionedProblem(
        size=problem.padded_size // unit,
        ranges=np.ascontiguousarray(ranges),
        sections=count,
        unit_bytes=unit,
        duration=np.where(wraps, problem.upper - problem.lower + period, problem.upper - problem.lower),
    )


def _maximal(lower: Integers, upper: Integers, wraps: npt.NDArray[np.bool_], count: int) -> Integers:
    """Pieces of time that follow a birth and precede a death."""
    born, dies = np.zeros(count + 1, bool), np.zeros(count + 1, bool)
    born[lower], dies[upper] = True, True
    if wraps.any():
        born[0], dies[count] = True, True
    maximal, fresh = [], False
    for piece in range(count):
        fresh = fresh or bool(born[piece])
        if fresh and dies[piece + 1]:
            maximal.append(piece)
            fresh = False
    return np.array(maximal, np.int64)


def independent_groups(problem: Problem) -> Iterator[Integers]:
    """Yield indices of buffers in groups such that buffers of different groups are never alive together."""
    if not len(problem):
        return
    if problem.wraps.any():  # the first and the last group of a step are one
        yield np.arange(len(problem))
        return
    order = np.argsort(problem.lower, kind="stable")
    latest = np.maximum.accumulate(problem.upper[order])
    starts = np.nonzero(problem.lower[order][1:] >= latest[:-1])[0] + 1
    yield from np.split(order, starts)
