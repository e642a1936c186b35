"""What the pictures of a training step's memory show: its buffers' places, and how much is held over its requests."""

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
from lightning_memo.utils.arrays import Integers
from lightning_memo.utils.units import format_bytes

KINDS: Final = {
    "input": "#e69f00",
    "layer forward": "#0072b2",
    "layer backward": "#d55e00",
    "between layers, loss": "#009e73",
    "optimizer": "#cc79a7",
}
"""Kinds of phases, and their colours, which people with colour-blindness can tell apart."""

_SHADES: Final = (1.0, 0.82, 0.66)
"""Opacity of buffers in turn: neighbours can be told apart without outlines, which would cover small ones."""

_KIND_OF_PHASE: Final = (
    (re.compile(r"input( \d+)?"), 0),
    (re.compile(r"layer \d+ forward( \d+)?"), 1),
    (re.compile(r"layer \d+ backward( \d+)?"), 2),
    (re.compile(r"optimizer( \d+)?"), 4),
)
_OTHER_KIND: Final = 3
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
BOUND_COLOR: Final = "#000000"


@dataclass(frozen=True)
class Look:
    """How a curve is drawn: "area", "solid" or "dashed"."""

    color: str
    style: str


CURVES: Final = {
    "live, of the planned requests": Look("#8a8a8a", "area"),
    "with the plan: arena, and the rest as modelled": Look(BOUND_COLOR, "solid"),
    "without: allocated, modelled": Look("#2a9fd6", "solid"),
    "without: reserved, modelled": Look("#7b61ff", "solid"),
    "without: reserved in expandable segments, modelled": Look("#7b61ff", "dashed"),
}
"""Memory over a step with and without the plan; without it, PyTorch's caching allocator is modelled."""


def request_offsets(trace: Trace, placement: StepPlacement) -> Integers:
    """[requests] Where each request of a trace lies, in bytes from the start of the arena; -1 where it has no place.

    Args:
        trace: The step that was planned.
        placement: Its places.

    Raises:
        ValueError: The placement is not for the requests of this trace.
    """
    offset = np.full(len(trace), -1, np.int64)
    placed = {phase.name: phase for phase in placement.phases}
    for number, name in enumerate(trace.phases):
        start, end = trace.phase_start[number : number + 2]
        rows = start + np.nonzero(trace.lane[start:end] == 0)[0]
        phase = placed.pop(name, None)
        sizes, offsets = ((), ()) if phase is None else (phase.sizes, phase.offsets)
        if trace.size[rows].tolist() != list(sizes):
            raise ValueError(f"phase {name[:60]!r}: the placement is for other requests than those of the trace")
        offset[rows] = offsets
    for name, phase in placed.items():
        if phase.sizes:
            raise ValueError(f"phase {name[:60]!r}: the placement has it, and the trace does not")
    unplanned = np.ones(len(trace), bool)
    unplanned[trace.planned] = False
    offset[unplanned] = -1
    return offset


@dataclass(frozen=True)
class MemoryStep:
    """What the pictures show."""

    trace: Trace
    placement: StepPlacement

    @cached_property
    def offset(self) -> Integers:
        return request_offsets(self.trace, self.placement)

    @cached_property
    def placed(self) -> Integers:
        """Indices of the requests that have a place."""
        return np.nonzero(self.offset >= 0)[0]

    @cached_property
    def lives(self) -> Problem:
        """Of the requests that have a place."""
        return problem_of(self.trace, 1).subset(np.nonzero(self.offset[self.trace.planned] >= 0)[0])

    @property
    def pieces(self) -> tuple[Integers, Integers, Integers]:
        """Request, start and end of every rectangle; a life over the end of the step has two."""
        wraps = self.lives.wraps
        start, end = self.lives.lower, np.where(wraps, len(self.trace), self.lives.upper)
        rest = np.zeros(int(wraps.sum()), np.int64)
        return (
            np.concatenate([self.placed, self.placed[wraps]]),
            np.concatenate([start, rest]),
            np.concatenate([end, self.lives.upper[wraps]]),
        )

    @cached_property
    def kinds(self) -> Integers:
        """[phases] Index into `KINDS`."""
        return np.array([_kind(name) for name in self.trace.phases], np.int64)

    def colors(self, row: Integers) -> npt.NDArray[np.float64]:
        """[rows, 4] Colours of requests."""
        from matplotlib.colors import to_rgba_array

        colors = to_rgba_array(list(KINDS.values()))[self.kinds[self.trace.phase[row]]]
        colors[:, 3] = np.array(_SHADES)[row % len(_SHADES)]
        return colors

    @cached_property
    def curves(self) -> tuple[Integers, ...]:
        """[requests] Bytes, in the order of `CURVES`."""
        without, expandable = replay(self.trace), replay(self.trace, expandable=True)
        with_plan = self.placement.peak_bytes + replay(self.without_places).reserved_bytes
        return self.live, with_plan, without.allocated_bytes, without.reserved_bytes, expandable.reserved_bytes

    @property
    def live(self) -> Integers:
        """[requests] Bytes of the buffers that have a place and live, when the request has been served."""
        times, load = self.lives.load
        return np.append(0, load)[np.searchsorted(times, np.arange(len(self.trace)), side="right")]

    @property
    def without_places(self) -> Trace:
        """The requests that are left to PyTorch's allocator."""
        return replace(self.trace, lane=np.where(self.offset >= 0, 1, self.trace.lane))

    @property
    def summary(self) -> str:
        peak, bound = self.placement.peak_bytes, self.placement.lower_bound_bytes
        ratio = f", ratio {peak / bound:.4f}" if bound else ""
        return f"peak {format_bytes(peak)}, lower bound {format_bytes(bound)}{ratio}"

    @staticmethod
    def unit(size_bytes: int) -> tuple[int, str]:
        """The unit for an axis up to some bytes: how many bytes it has, and its name."""
        power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        return 1024**power, _UNITS[power]

    @property
    def document(self) -> dict[str, Any]:
        """What the page is drawn from, short: sizes repeat, and what is reserved seldom changes."""
        sizes, size = np.unique(self.trace.size, return_inverse=True)
        return {
            "kinds": KINDS,
            "shades": _SHADES,
            "phases": self.trace.phases,
            "kind": self.kinds.tolist(),
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


def _kind(phase: str) -> int:
    return next((kind for pattern, kind in _KIND_OF_PHASE if pattern.fullmatch(phase)), _OTHER_KIND)


def _changes(values: Integers) -> list[list[int]]:
    """Requests at which a curve changes, as distances from the one before, and the values from there on."""
    at = np.nonzero(np.diff(values, prepend=-1))[0]
    return [np.diff(at, prepend=0).tolist(), values[at].tolist()]
