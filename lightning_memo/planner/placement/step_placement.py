"""Places all buffers of a training step (MEMO, section 4.3), flat and bi-level, and sorts their offsets by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from lightning_memo.artifacts.buffer_placement import PhasePlacement, StepPlacement
from lightning_memo.artifacts.trace import Trace
from lightning_memo.planner.placement import Placement, Problem, Progress, place
from lightning_memo.planner.placement.problem import peak_bytes, validate
from lightning_memo.utils.array_types import Integers

SHARES: Final = (1.0, 0.5, 0.25, 0.1)
"""Buffers that live for at least this share of their phase are placed individually in the second level."""

_BLOCK_SECONDS: Final = 2.0


@dataclass(frozen=True)
class _Block:
    """Short-lived buffers of one phase that are placed among themselves and moved as one by the second level."""

    buffers: Integers
    offset: Integers
    size: int


def problem_of(trace: Trace, alignment: int) -> Problem:
    """Placement problem of the planned requests of a step, in the order of the requests.

    Args:
        trace: The recorded step.
        alignment: Bytes that offsets are multiples of.
    """
    upper = trace.death[trace.planned]
    # A buffer that dies before the first request of the next step dies at the end of this one.
    return Problem(
        lower=trace.planned,
        upper=np.where(upper == 0, len(trace), upper),
        size=trace.size[trace.planned],
        alignment=alignment,
        period=len(trace),
    )


def plan_memory(
    trace: Trace,
    *,
    alignment: int,
    time_limit_seconds: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
) -> Placement:
    """Place the planned requests of a step.

    Args:
        trace: The recorded step.
        alignment: Bytes that offsets are multiples of.
        time_limit_seconds: Maximum time to search.
        progress: Called from time to time.

    Returns:
        One offset for each of `trace.planned`.
    """
    start = time.perf_counter()
    problem = problem_of(trace, alignment)

    def left() -> float:
        return max(time_limit_seconds - (time.perf_counter() - start), 0.0)

    best = place(problem, time_limit_seconds=time_limit_seconds / 2, progress=progress)
    for share in SHARES:
        if best.optimal or left() <= 0:
            break
        # Problems of the second level are so small that search and HiGHS can help where one-pass placements do not.
        candidate = place_bilevel(trace, alignment=alignment, share=share, time_limit_seconds=left() / len(SHARES))
        if candidate.peak_bytes < best.peak_bytes:
            best = candidate
    return replace(
        best,
        lower_bound_bytes=max(best.lower_bound_bytes, problem.lower_bound_bytes),
        seconds=time_limit_seconds - left(),
    )


def place_step(trace: Trace, placement: Placement, *, min_bytes: int, threads: int) -> StepPlacement:
    """Offsets for all requests of a step.

    Args:
        trace: The recorded step.
        placement: One offset for each of `trace.planned`.
        min_bytes: Minimum size of the requests that were recorded.
        threads: Number of CPU threads that computed while the step was recorded.
    """
    offset = np.full(len(trace), -1, np.int64)
    offset[trace.planned] = placement.offset
    phases = []
    for number, name in enumerate(trace.phases):
        rows = slice(*trace.phase_start[number : number + 2])
        in_lane = trace.lane[rows] == 0
        sizes, offsets = (column[rows][in_lane].tolist() for column in (trace.size, offset))
        phases.append(PhasePlacement(name=name, sizes=tuple(sizes), offsets=tuple(offsets)))
    return StepPlacement(
        phases=tuple(phases),
        peak_bytes=placement.peak_bytes,
        lower_bound_bytes=placement.lower_bound_bytes,
        min_bytes=min_bytes,
        threads=threads,
        method=placement.method,
        seconds=placement.seconds,
    )


def place_bilevel(trace: Trace, *, alignment: int, share: float, time_limit_seconds: float = 60.0) -> Placement:
    """Place the buffers of each phase first, then the phases and the buffers that outlive them (MEMO, section 4.3).

    With a share above 1, all buffers that are born and die in a phase form one block, as in the paper. With smaller
    shares, long-lived buffers are placed individually, and the others form several blocks, which are separated by times
    at which none of them is alive.

    Args:
        trace: The recorded step.
        alignment: Bytes that offsets are multiples of.
        share: Share of the requests of its phase that a buffer has to outlive to be placed individually.
        time_limit_seconds: Maximum time to search.
    """
    start = time.perf_counter()
    problem = problem_of(trace, alignment)
    blocks = list(_blocks(trace, problem, share))
    inside = np.concatenate([block.buffers for block in blocks]) if blocks else np.zeros(0, np.int64)
    single = np.setdiff1d(np.arange(len(problem)), inside)
    upper_level = Problem(
        lower=np.array([*(problem.lower[b.buffers].min() for b in blocks), *problem.lower[single]], np.int64),
        upper=np.array([*(problem.upper[b.buffers].max() for b in blocks), *problem.upper[single]], np.int64),
        size=np.array([*(b.size for b in blocks), *problem.size[single]], np.int64),
        alignment=alignment,
        period=problem.period,
    )
    placed = place(upper_level, time_limit_seconds=time_limit_seconds)
    offset = np.zeros(len(problem), np.int64)
    for block, base in zip(blocks, placed.offset, strict=False):
        offset[block.buffers] = base + block.offset
    offset[single] = placed.offset[len(blocks) :]
    result = Placement(
        offset=offset,
        peak_bytes=peak_bytes(problem, offset),
        lower_bound_bytes=min(problem.lower_bound_bytes, peak_bytes(problem, offset)),
        method=f"bi-level, {placed.method}",
        seconds=time.perf_counter() - start,
    )
    findings = validate(problem, result)
    if findings:
        raise RuntimeError(f"a bi-level placement is invalid, please report this bug: {findings[0]}")
    return result


def _blocks(trace: Trace, problem: Problem, share: float) -> Iterator[_Block]:
    """First level: place each phase by itself. Phases with the same requests are solved once."""
    solved: dict[bytes, tuple[Integers, int]] = {}
    for buffers in _local_groups(trace, problem, share):
        birth = problem.lower[buffers]
        lifetimes = np.stack([birth - birth[0], problem.upper[buffers] - birth[0], problem.size[buffers]])
        if lifetimes.tobytes() not in solved:
            alone = Problem(lower=lifetimes[0], upper=lifetimes[1], size=lifetimes[2], alignment=problem.alignment)
            placement = place(alone, time_limit_seconds=_BLOCK_SECONDS)
            solved[lifetimes.tobytes()] = placement.offset, placement.peak_bytes
        yield _Block(buffers, *solved[lifetimes.tobytes()])


def _local_groups(trace: Trace, problem: Problem, share: float) -> Iterator[Integers]:
    """Short-lived buffers that are born and die in one phase, in groups that are never alive together."""
    phase = trace.phase[trace.planned]
    requests = np.diff(trace.phase_start)[phase]
    ends_inside = ~problem.wraps & (problem.upper <= trace.phase_start[phase + 1])
    local = np.nonzero(ends_inside & (problem.upper - problem.lower < share * requests))[0]
    if not len(local):
        return
    if share > 1:
        starts = np.nonzero(np.diff(phase[local]))[0] + 1
    else:
        latest = np.maximum.accumulate(problem.upper[local])
        starts = np.nonzero((problem.lower[local][1:] >= latest[:-1]) | (np.diff(phase[local]) > 0))[0] + 1
    yield from np.split(local, starts)
