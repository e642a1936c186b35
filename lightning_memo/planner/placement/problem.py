"""The placement problem and its solution, and the division of time into sections."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_memo.utils.array_types import Integers

MAX_BYTES = 2**61
"""Maximum total size of all buffers, so that no sum of an offset and a size overflows 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Buffers with lifetimes that need offsets such that no two buffers overlap while both are alive.

    A buffer lives in `[lower, upper)`. With a `period`, time is cyclic, like training steps: a buffer with
    `upper <= lower` lives across the end of a step, in `[lower, period)` and in `[0, upper)` of the next step.

    Raises:
        ValueError: The arrays differ in length, a size is negative, a lifetime is empty or outside the period, the
            alignment is below 1, or the sizes sum to more than 2^61 bytes.
    """

    lower: Integers
    """[buffers] Time of birth."""

    upper: Integers
    """[buffers] Time of death."""

    size: Integers
    """[buffers] Size in bytes."""

    alignment: int = 1
    """Offsets are multiples of this many bytes."""

    period: int | None = None
    """Length of a step in the unit of `lower`; None if time is not cyclic."""

    def __post_init__(self) -> None:
        if not len(self.lower) == len(self.upper) == len(self.size):
            raise ValueError(
                f"{len(self.lower)} births, {len(self.upper)} deaths and {len(self.size)} sizes: every "
                "buffer needs one of each"
            )
        if not 1 <= self.alignment <= MAX_BYTES:
            raise ValueError(f"alignment={self.alignment} must be from 1 to {MAX_BYTES} bytes")
        self._refuse(self.size < 0, "size", "sizes must be at least 0")
        if self.period is None:
            self._refuse(self.upper <= self.lower, "upper", "a buffer must die after its birth")
        else:
            self._refuse(
                (self.lower < 0) | (self.lower >= self.period), "lower", f"births must be in [0, {self.period})"
            )
            self._refuse(
                (self.upper < 0) | (self.upper > self.period), "upper", f"deaths must be in [0, {self.period}]"
            )
        # Python integers, because neither the sum nor its terms have to fit 64 bits.
        if sum(-(-size // self.alignment) * self.alignment for size in self.size.tolist()) > MAX_BYTES:
            raise ValueError(f"the sizes sum to more than {MAX_BYTES} bytes, which is the maximum")

    def _refuse(self, wrong: npt.NDArray[np.bool_], name: str, rule: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(f"buffer {first}: {name}={int(getattr(self, name)[first])}, but {rule}")

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def padded_size(self) -> Integers:
        """[buffers] Size rounded up to the alignment."""
        return -(-self.size // self.alignment) * self.alignment

    @cached_property
    def wraps(self) -> npt.NDArray[np.bool_]:
        """[buffers] Whether the buffer lives across the end of a step."""
        return self.upper <= self.lower

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Largest number of bytes alive at the same time, below which no peak can be."""
        return int(self.load[1].max(initial=0))

    @cached_property
    def load(self) -> tuple[Integers, Integers]:
        """Ascending times at which the live bytes change, and the live bytes from each time on."""
        birth = np.concatenate([self.lower, np.zeros(int(self.wraps.sum()), np.int64)])
        size = np.concatenate([self.padded_size, self.padded_size[self.wraps]])
        change = np.concatenate([size, -self.padded_size])
        times, where = np.unique(np.concatenate([birth, self.upper]), return_inverse=True)
        steps = np.zeros(len(times), np.int64)
        np.add.at(steps, where, change)
        return times, np.cumsum(steps)

    def subset(self, buffers: Integers) -> Problem:
        """The problem with only some of the buffers.

        Args:
            buffers: Indices of the buffers.
        """
        return Problem(
            lower=self.lower[buffers],
            upper=self.upper[buffers],
            size=self.size[buffers],
            alignment=self.alignment,
            period=self.period,
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Offsets of the buffers of a problem."""

    offset: Integers = field(repr=False)
    """[buffers] Offset from the start of the arena in bytes."""

    peak_bytes: int
    """Size of the arena: the end of the highest buffer, rounded up to the alignment."""

    lower_bound_bytes: int
    """Lower bound of the peak of any placement: the largest live bytes, or a higher bound that a search has proven."""

    method: str
    """Algorithm that found the placement."""

    seconds: float
    """Seconds that the solver took."""

    @property
    def optimal(self) -> bool:
        """Whether the peak is proven to be minimal."""
        return self.peak_bytes == self.lower_bound_bytes

    @property
    def gap(self) -> float:
        """Relative distance of the peak from the lower bound."""
        return self.peak_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


def peak_bytes(problem: Problem, offset: Integers) -> int:
    """End of the highest buffer, rounded up to the alignment.

    Args:
        problem: The buffers.
        offset: [buffers] Offset of each buffer.
    """
    return int((offset + problem.padded_size).max(initial=0))


class PlacementFault(Enum):
    """Reasons why a placement is invalid."""

    COUNT = "the placement does not have one offset for each buffer"
    NOT_AN_INTEGER = "the offset is not an integer"
    NEGATIVE = "the offset is below 0"
    MISALIGNED = "the offset is not a multiple of the alignment"
    OVERLAP = "two buffers overlap while both are alive"
    PEAK = "a buffer ends above the peak"
    CAPACITY = "a buffer ends above the capacity"
    BOUND = "the peak is below the lower bound"


@dataclass(frozen=True, slots=True)
class Finding:
    """A violated rule and the buffers that violate it."""

    fault: PlacementFault
    buffers: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = f" (buffer{'s' * (len(self.buffers) > 1)} {', '.join(map(str, self.buffers))})" if self.buffers else ""
        return f"{self.fault.value}{who}"


def validate(problem: Problem, placement: Placement, capacity_bytes: int | None = None) -> list[Finding]:
    """Check a placement.

    Args:
        problem: The buffers.
        placement: Their offsets.
        capacity_bytes: Maximum peak; None for no limit.

    Returns:
        All findings; empty if the placement is valid.
    """
    offsets = placement.offset.tolist()
    if len(offsets) != len(problem):
        return [Finding(PlacementFault.COUNT)]
    findings = list(_check_each(problem, placement, offsets, capacity_bytes))
    if not any(finding.fault is PlacementFault.NOT_AN_INTEGER for finding in findings):
        findings += dict.fromkeys(_overlaps(problem, offsets))  # two buffers that wrap may overlap twice
    if placement.peak_bytes < placement.lower_bound_bytes:
        findings.append(Finding(PlacementFault.BOUND))
    return findings


def _check_each(
    problem: Problem, placement: Placement, offsets: list[int], capacity_bytes: int | None
) -> Iterator[Finding]:
    for buffer, (offset, size) in enumerate(zip(offsets, problem.size.tolist(), strict=True)):
        if not isinstance(offset, int):
            yield Finding(PlacementFault.NOT_AN_INTEGER, (buffer,))
            continue
        if offset < 0:
            yield Finding(PlacementFault.NEGATIVE, (buffer,))
        if offset % problem.alignment:
            yield Finding(PlacementFault.MISALIGNED, (buffer,))
        if offset + size > placement.peak_bytes:
            yield Finding(PlacementFault.PEAK, (buffer,))
        if capacity_bytes is not None and offset + size > capacity_bytes:
            yield Finding(PlacementFault.CAPACITY, (buffer,))


def _overlaps(problem: Problem, offsets: list[int]) -> Iterator[Finding]:
    """Sweep through time, comparing each new buffer with its neighbors among the live buffers sorted by offset."""
    events = []
    for buffer, (lower, upper, size) in enumerate(
        zip(problem.lower.tolist(), problem.upper.tolist(), problem.size.tolist(), strict=True)
    ):
        if size == 0:
            continue
        spans = [(lower, upper)] if lower < upper else [(0, upper), (lower, problem.period)]
        for start, end in spans:
            if start < end:
                events += [(start, 1, buffer), (end, 0, buffer)]
    live: list[tuple[int, int, int]] = []  # offset, end, buffer
    for _, born, buffer in sorted(events):  # deaths come before births at the same time
        entry = (offsets[buffer], offsets[buffer] + int(problem.size[buffer]), buffer)
        if not born:
            live.pop(bisect_left(live, entry))
            continue
        place = bisect_left(live, entry)
        for below, above in ((live[place - 1 : place], [entry]), ([entry], live[place : place + 1])):
            if below and above and below[0][1] > above[0][0]:
                yield Finding(PlacementFault.OVERLAP, (min(below[0][2], above[0][2]), max(below[0][2], above[0][2])))
        insort(live, entry)


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
