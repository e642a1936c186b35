"""Converts a placement to the offsets of the requests of each phase, which the allocator serves."""

from __future__ import annotations

import numpy as np

from lightning_memo.artifacts.buffer_placement import PhasePlacement, StepPlacement
from lightning_memo.artifacts.trace import Trace
from lightning_memo.planner.placement import Placement


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
