"""Pictures and an HTML page of the memory of a training step: offsets of buffers, and memory use over the requests."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.trace import Trace
from lightning_memo.planner.placement.caching_allocator import replay
from lightning_memo.planner.placement.problem import Problem
from lightning_memo.planner.placement.step_placement import problem_of
from lightning_memo.utils.array_types import Integers
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import format_bytes

PHASE_COLORS: Final = {
    "input": "#e69f00",
    "layer forward": "#0072b2",
    "layer backward": "#d55e00",
    "between layers, loss": "#009e73",
    "optimizer": "#cc79a7",
}
"""Groups of phases with their colors, which color-blind people can distinguish."""
_PLAIN_PHASE_COLORS: Final = {"forward": "#0072b2", "backward": "#d55e00", "optimizer": "#cc79a7"}
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
_BOUND_COLOR: Final = "#000000"

_PEAK_COLOR: Final = "#555555"

_TEMPLATE: Final = Path(__file__).with_name("memory_page.html")
"""The page, with placeholders such as @DATA@ for the content that depends on the step."""


def memory_map(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Draw a PNG of the offsets of a step's buffers: address over time.

    Args:
        trace: The step that was planned.
        placement: Offsets of its buffers.
        path: The file. Its folder is created if missing.

    Raises:
        ValueError: The placement belongs to other requests than those of the trace.
        OSError: The file cannot be written.
    """
    from matplotlib.collections import PolyCollection  # the import takes a second, and only few runs draw

    step = _MemoryStep(trace, placement)
    power, unit = step.unit(placement.peak_bytes)
    with _figure(step, f"Offsets of a step's buffers: {step.summary}", path) as (figure, axes):
        row, left, right = step.pieces
        low = step.offset[row] / power
        high = low + trace.size[row] / power
        corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
        axes.add_collection(
            PolyCollection(list(corners), facecolors=step.colors(row), linewidths=0, snap=False, rasterized=True),
            autolim=False,
        )
        axes.axhline(placement.peak_bytes / power, color=_PEAK_COLOR, linewidth=3, alpha=0.5, label="peak of the plan")
        axes.axhline(
            placement.lower_bound_bytes / power, color=_BOUND_COLOR, linewidth=1, linestyle="--", label="lower bound"
        )
        axes.set_ylim(0, 1.04 * placement.peak_bytes / power or 1)
        axes.set_ylabel(f"address in the arena ({unit})")
        _legend(step, figure, axes)


def memory_curve(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Draw a PNG of memory over a step, with the plan and with a simulation of PyTorch's caching allocator.

    Args:
        trace: The step that was planned.
        placement: Offsets of its buffers.
        path: The file. Its folder is created if missing.

    Raises:
        ValueError: The placement belongs to other requests than those of the trace.
        OSError: The file cannot be written.
    """
    step = _MemoryStep(trace, placement)
    highest = max(int(values.max(initial=0)) for values in step.curves)
    power, unit = step.unit(highest)
    with _figure(step, f"Memory over a step: {step.summary}", path) as (figure, axes):
        for (label, look), values in zip(_CURVES.items(), step.curves, strict=True):
            _draw_curve(axes, values / power, look, f"{label}: {format_bytes(int(values.max(initial=0)))}")
        axes.set_ylim(0, 1.04 * highest / power or 1)
        axes.set_ylabel(f"memory ({unit})")
        axes.grid(visible=True, alpha=0.3)
        _legend(step, figure, axes)


@contextmanager
def _figure(step: _MemoryStep, title: str, path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """Yield axes over the time of a step, with its phases on top, and save the figure afterwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 36])
    figure.suptitle(title)
    start = step.trace.phase_start
    for group, color in enumerate(step.phase_colors.values()):
        phases = np.nonzero(step.phase_groups == group)[0]
        strip.broken_barh(np.stack([start[phases], np.diff(start)[phases]], axis=1), (0, 1), color=color, linewidth=0)
    strip.set_axis_off()
    strip.set_ylim(0, 1)
    axes.set_xlim(0, max(len(step.trace), 1))
    axes.set_xlabel("time (requests of the step)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    yield figure, axes
    with replacing(Path(path)) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)


def _draw_curve(axes: Any, values: npt.NDArray[np.float64], look: _Look, label: str) -> None:
    values = np.append(values, values[-1:])  # the last value lasts to the end of the step
    times = np.arange(len(values))
    if look.style == "area":
        axes.fill_between(times, values, step="post", color=look.color, linewidth=0, label=label)
    else:
        axes.step(times, values, where="post", color=look.color, linestyle=look.style, linewidth=1.2, label=label)


def _legend(step: _MemoryStep, figure: Any, axes: Any) -> None:
    """Add a legend of the phases and of all labels below the axes."""
    from matplotlib.patches import Patch

    groups = [Patch(color=color, label=group) for group, color in step.phase_colors.items()]
    figure.legend(handles=groups, loc="outside lower center", ncols=len(groups), frameon=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)


def memory_page(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Write an HTML page with the memory map and the memory curve, which can be zoomed and panned without a network.

    Args:
        trace: The step that was planned.
        placement: Offsets of its buffers.
        path: The file. Its folder is created if missing.

    Raises:
        ValueError: The placement belongs to other requests than those of the trace.
        OSError: The file cannot be written.
    """
    step = _MemoryStep(trace, placement)
    template = _TEMPLATE.read_text(encoding="utf-8")
    parts = {
        "SUMMARY": html.escape(step.summary),
        "DETAILS": html.escape(
            f"{len(step.placed):,} of {len(trace):,} requests have an offset; found by: {placement.method}"
        ),
        "STYLE_HASH": _hash(template, "style"),
        "SCRIPT_HASH": _hash(template, "script"),
        "DATA": _for_script(step.document),
    }
    # In one pass, so that text in a part that looks like a placeholder stays unchanged.
    page = re.sub(rf"@({'|'.join(parts)})@", lambda found: parts[found[1]], template)
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(page, encoding="utf-8", errors="replace")  # unpaired surrogates cannot be encoded


def _hash(template: str, tag: str) -> str:
    """Hash for the content security policy, which allows only the page's own style and script."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _for_script(document: dict[str, Any]) -> str:
    """JSON that cannot end the script element that contains it, whatever names occur in it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@dataclass(frozen=True)
class _Look:
    """Color and style of a curve; the style is "area", "solid" or "dashed"."""

    color: str
    style: str


_CURVES: Final = {
    "live bytes of the planned requests": _Look("#8a8a8a", "area"),
    "with the plan: arena, and simulated allocator for the rest": _Look(_BOUND_COLOR, "solid"),
    "without the plan: allocated, simulated": _Look("#2a9fd6", "solid"),
    "without the plan: reserved, simulated": _Look("#7b61ff", "solid"),
    "without the plan: reserved in expandable segments, simulated": _Look("#7b61ff", "dashed"),
}
"""Curves of memory over a step, with the plan and with a simulation of PyTorch's caching allocator."""


@dataclass(frozen=True)
class _MemoryStep:
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
        return PHASE_COLORS if self._has_layers else _PLAIN_PHASE_COLORS

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
        """[requests] Bytes of each curve, in the order of `_CURVES`."""
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
                for (label, look), values in zip(_CURVES.items(), self.curves, strict=True)
            ],
        }


def _group_of(phase: str) -> str:
    return next((group for pattern, group in _GROUP_OF_PHASE if pattern.fullmatch(phase)), _OTHER_GROUP)


def _changes(values: Integers) -> list[list[int]]:
    """Requests at which a curve changes, as distances from the previous change, and the new values."""
    at = np.nonzero(np.diff(values, prepend=-1))[0]
    return [np.diff(at, prepend=0).tolist(), values[at].tolist()]


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
