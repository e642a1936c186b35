"""Data of the memory pictures: the offsets of a step's buffers, and memory use over its requests."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.trace import Trace
from lightning_memo.planner.placement.caching_allocator import replay
from lightning_memo.planner.placement.problem import Problem
from lightning_memo.planner.placement.step_placement import problem_of
from lightning_memo.utils.array_types import Integers
from lightning_memo.utils.units import format_bytes

PHASE_COLORS: Final = {
    "input": "#e69f00",
    "layer forward": "#0072b2",
    "layer backward": "#d55e00",
    "between layers, loss": "#009e73",
    "optimizer": "#cc79a7",
}
"""Groups of phases with their colors, which color-blind people can distinguish."""

PLAIN_PHASE_COLORS: Final = {"forward": "#0072b2", "backward": "#d55e00", "optimizer": "#cc79a7"}
"""The groups if layers run plainly. They mark no phases then, so "input" and "backward" last until the next one."""

_SHADES: Final = (1.0, 0.82, 0.66)
"""Opacities of successive buffers, to distinguish neighbors without outlines, which would cover small buffers."""

_GROUP_OF_PHASE: Final = (
    (re.compile(r"input( \d+)?"), "input"),
    (re.compile(r"layer \d+ forward( \d+)?"), "layer forward"),
    (re.compile(r"layer \d+ backward( \d+)?"), "layer backward"),
    (re.compile(r"optimizer( \d+)?"), "optimizer"),
)
_OTHER_GROUP: Final = "between layers, loss"
_PLAIN_GROUPS: Final = {"input": "forward", _OTHER_GROUP: "backward", "optimizer": "optimizer"}
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
BOUND_COLOR: Final = "#000000"


@dataclass(frozen=True)
class Look:
    """Color and style of a curve; the style is "area", "solid" or "dashed"."""

    color: str
    style: str


CURVES: Final = {
    "live bytes of the planned requests": Look("#8a8a8a", "area"),
    "with the plan: arena, and simulated allocator for the rest": Look(BOUND_COLOR, "solid"),
    "without the plan: allocated, simulated": Look("#2a9fd6", "solid"),
    "without the plan: reserved, simulated": Look("#7b61ff", "solid"),
    "without the plan: reserved in expandable segments, simulated": Look("#7b61ff", "dashed"),
}
"""Curves of memory over a step, with the plan and with a simulation of PyTorch's caching allocator."""


def request_offsets(trace: Trace, placement: StepPlacement) -> Integers:
    """[requests] Offset of each request of a trace in the arena, in bytes; -1 if it has no offset.

    Args:
        trace: The step that was planned.
        placement: Offsets of its buffers.

    Raises:
        ValueError: The placement belongs to other requests than those of the trace.
    """
    offset = np.full(len(trace), -1, np.int64)
    placed = {phase.name: phase for phase in placement.phases}
    for number, name in enumerate(trace.phases):
        start, end = trace.phase_start[number : number + 2]
        rows = start + np.nonzero(trace.lane[start:end] == 0)[0]
        phase = placed.pop(name, None)
        sizes, offsets = ((), ()) if phase is None else (phase.sizes, phase.offsets)
        if trace.size[rows].tolist() != list(sizes):
            raise ValueError(f"phase {name[:60]!r}: the placement belongs to other requests than those of the trace")
        offset[rows] = offsets
    for name, phase in placed.items():
        if phase.sizes:
            raise ValueError(f"phase {name[:60]!r}: the placement has this phase, but the trace does not")
    unplanned = np.ones(len(trace), bool)
    unplanned[trace.planned] = False
    offset[unplanned] = -1
    return offset


@dataclass(frozen=True)
class MemoryStep:
    """A step and its placement, prepared for the pictures."""

    trace: Trace
    placement: StepPlacement

    @cached_property
    def offset(self) -> Integers:
        return request_offsets(self.trace, self.placement)

    @cached_property
    def placed(self) -> Integers:
        """Indices of the requests that have an offset."""
        return np.nonzero(self.offset >= 0)[0]

    @cached_property
    def lives(self) -> Problem:
        """Lifetimes of the requests that have an offset."""
        return problem_of(self.trace, 1).subset(np.nonzero(self.offset[self.trace.planned] >= 0)[0])

    @property
    def pieces(self) -> tuple[Integers, Integers, Integers]:
        """Request, start and end of every rectangle. A lifetime across the end of the step has two rectangles."""
        wraps = self.lives.wraps
        start, end = self.lives.lower, np.where(wraps, len(self.trace), self.lives.upper)
        rest = np.zeros(int(wraps.sum()), np.int64)
        return (
            np.concatenate([self.placed, self.placed[wraps]]),
            np.concatenate([start, rest]),
            np.concatenate([end, self.lives.upper[wraps]]),
        )

    @cached_property
    def _phase_group_names(self) -> list[str]:
        groups = [_group_of(name) for name in self.trace.phases]
        return groups if self._has_layers else [_PLAIN_GROUPS[group] for group in groups]

    @cached_property
    def _has_layers(self) -> bool:
        return any(_group_of(name).startswith("layer") for name in self.trace.phases)

    @property
    def phase_colors(self) -> dict[str, str]:
        """Groups of the step's phases with their colors."""
        return PHASE_COLORS if self._has_layers else PLAIN_PHASE_COLORS

    @cached_property
    def phase_groups(self) -> Integers:
        """[phases] Index into `phase_colors`."""
        place = {group: index for index, group in enumerate(self.phase_colors)}
        return np.array([place[group] for group in self._phase_group_names], np.int64)

    @property
    def phase_names(self) -> tuple[str, ...]:
        """The names to show: "input" is the whole forward if layers mark no phases."""
        names = self.trace.phases
        if self._has_layers:
            return names
        return tuple(f"forward{name[5:]}" if _group_of(name) == "input" else name for name in names)

    def colors(self, row: Integers) -> npt.NDArray[np.float64]:
        """[rows, 4] RGBA colors of requests."""
        from matplotlib.colors import to_rgba_array

        colors = to_rgba_array(list(self.phase_colors.values()))[self.phase_groups[self.trace.phase[row]]]
        colors[:, 3] = np.array(_SHADES)[row % len(_SHADES)]
        return colors

    @cached_property
    def curves(self) -> tuple[Integers, ...]:
        """[requests] Bytes of each curve, in the order of `CURVES`."""
        without, expandable = replay(self.trace), replay(self.trace, expandable=True)
        with_plan = self.placement.arena_bytes + replay(self.without_places).reserved_bytes
        return self.live, with_plan, without.allocated_bytes, without.reserved_bytes, expandable.reserved_bytes

    @property
    def live(self) -> Integers:
        """[requests] Live bytes of the buffers that have an offset, after each request."""
        times, load = self.lives.load
        return np.append(0, load)[np.searchsorted(times, np.arange(len(self.trace)), side="right")]

    @property
    def without_places(self) -> Trace:
        """The trace of the requests that PyTorch's allocator serves."""
        return replace(self.trace, lane=np.where(self.offset >= 0, 1, self.trace.lane))

    @property
    def summary(self) -> str:
        peak, bound = self.placement.peak_bytes, self.placement.lower_bound_bytes
        ratio = f", ratio {peak / bound:.4f}" if bound else ""
        return f"peak {format_bytes(peak)}, lower bound {format_bytes(bound)}{ratio}"

    @staticmethod
    def unit(size_bytes: int) -> tuple[int, str]:
        """Unit for an axis up to some bytes, as its number of bytes and its name."""
        power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        return 1024**power, _UNITS[power]

    @property
    def document(self) -> dict[str, Any]:
        """Data of the HTML page. It is compressed, because sizes repeat and curves rarely change."""
        sizes, size = np.unique(self.trace.size, return_inverse=True)
        return {
            "kinds": self.phase_colors,
            "shades": _SHADES,
            "phases": self.phase_names,
            "kind": self.phase_groups.tolist(),
            "start": self.trace.phase_start.tolist(),
            "sizes": sizes.tolist(),
            "size": size.tolist(),
            "death": self.trace.death.tolist(),
            "offset": self.offset.tolist(),
            "lane": np.argwhere(self.trace.lane).ravel().tolist(),
            "peak": self.placement.peak_bytes,
            "bound": self.placement.lower_bound_bytes,
            "curves": [
                {"label": label, **asdict(look), "values": _changes(values)}
                for (label, look), values in zip(CURVES.items(), self.curves, strict=True)
            ],
        }


def _group_of(phase: str) -> str:
    return next((group for pattern, group in _GROUP_OF_PHASE if pattern.fullmatch(phase)), _OTHER_GROUP)


def _changes(values: Integers) -> list[list[int]]:
    """Requests at which a curve changes, as distances from the previous change, and the new values."""
    at = np.nonzero(np.diff(values, prepend=-1))[0]
    return [np.diff(at, prepend=0).tolist(), values[at].tolist()]
