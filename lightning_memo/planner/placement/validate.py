"""Checks a placement independently of the solver, with which it shares no code."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from lightning_memo.planner.placement.problem import Placement, Problem


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
