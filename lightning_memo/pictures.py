"""Pictures of the memory of a training step: where its buffers lie, and how much is held over its requests."""

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

from lightning_memo.config import format_bytes
from lightning_memo.files import replacing
from lightning_memo.plan import StepPlacement
from lightning_memo.planner.caching import replay
from lightning_memo.planner.placement.problem import Integers, Problem
from lightning_memo.trace import Trace

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
_PEAK, _BOUND = "#555555", "#000000"
_TEMPLATE: Final = Path(__file__).with_name("memory_page.html")
"""The page, with placeholders like @DATA@ for what depends on the step."""


@dataclass(frozen=True)
class _Look:
    """How a curve is drawn: "area", "solid" or "dashed"."""

    color: str
    style: str


_CURVES: Final = {
    "live, of the planned requests": _Look("#8a8a8a", "area"),
    "with the plan: arena, and the rest as modelled": _Look(_BOUND, "solid"),
    "without: allocated, modelled": _Look("#2a9fd6", "solid"),
    "without: reserved, modelled": _Look("#7b61ff", "solid"),
    "without: reserved in expandable segments, modelled": _Look("#7b61ff", "dashed"),
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


def memory_map(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Draws a PNG of the places of a step's buffers: address over time.

    Args:
        trace: The step that was planned.
        placement: Its places.
        path: The file; its folder is made if missing.

    Raises:
        ValueError: The placement is not for the requests of this trace.
        OSError: The file can't be written.
    """
    from matplotlib.collections import PolyCollection  # takes a second, and only few runs draw

    step = _Step(trace, placement)
    power, unit = step.unit(placement.peak_bytes)
    with _figure(step, f"Places of a step's buffers: {step.summary}", path) as (figure, axes):
        row, left, right = step.pieces
        low = step.offset[row] / power
        high = low + trace.size[row] / power
        corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
        axes.add_collection(
            PolyCollection(list(corners), facecolors=step.colors(row), linewidths=0, snap=False, rasterized=True),
            autolim=False,
        )
        axes.axhline(placement.peak_bytes / power, color=_PEAK, linewidth=3, alpha=0.5, label="peak of the plan")
        axes.axhline(
            placement.lower_bound_bytes / power, color=_BOUND, linewidth=1, linestyle="--", label="lower bound"
        )
        axes.set_ylim(0, 1.04 * placement.peak_bytes / power or 1)
        axes.set_ylabel(f"address in the arena ({unit})")
        _legend(figure, axes)


def memory_curve(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Draws a PNG of memory over a step: with the plan, and with PyTorch's caching allocator as modelled.

    Args:
        trace: The step that was planned.
        placement: Its places.
        path: The file; its folder is made if missing.

    Raises:
        ValueError: The placement is not for the requests of this trace.
        OSError: The file can't be written.
    """
    step = _Step(trace, placement)
    highest = max(int(values.max(initial=0)) for values in step.curves)
    power, unit = step.unit(highest)
    with _figure(step, f"Memory over a step: {step.summary}", path) as (figure, axes):
        for (label, look), values in zip(_CURVES.items(), step.curves, strict=True):
            _draw_curve(axes, values / power, look, f"{label}: {format_bytes(int(values.max(initial=0)))}")
        axes.set_ylim(0, 1.04 * highest / power or 1)
        axes.set_ylabel(f"memory ({unit})")
        axes.grid(visible=True, alpha=0.3)
        _legend(figure, axes)


def memory_page(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Writes one HTML page with both pictures to zoom, pan and point into; it needs no network.

    Args:
        trace: The step that was planned.
        placement: Its places.
        path: The file; its folder is made if missing.

    Raises:
        ValueError: The placement is not for the requests of this trace.
        OSError: The file can't be written.
    """
    step = _Step(trace, placement)
    template = _TEMPLATE.read_text(encoding="utf-8")
    parts = {
        "SUMMARY": html.escape(step.summary),
        "DETAILS": html.escape(
            f"{len(step.placed):,} of {len(trace):,} requests have a place; found by: {placement.method}"
        ),
        "STYLE_HASH": _hash(template, "style"),
        "SCRIPT_HASH": _hash(template, "script"),
        "DATA": _for_script(step.document),
    }
    # All at once: what looks like a placeholder in a part stays as it is.
    page = re.sub(rf"@({'|'.join(parts)})@", lambda found: parts[found[1]], template)
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(page, encoding="utf-8", errors="replace")  # half of a surrogate pair can't be written


@dataclass(frozen=True)
class _Step:
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
        return self.trace.problem(1).subset(np.nonzero(self.offset[self.trace.planned] >= 0)[0])

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
        """[requests] Bytes, in the order of `_CURVES`."""
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
                for (label, look), values in zip(_CURVES.items(), self.curves, strict=True)
            ],
        }


def _kind(phase: str) -> int:
    return next((kind for pattern, kind in _KIND_OF_PHASE if pattern.fullmatch(phase)), _OTHER_KIND)


def _changes(values: Integers) -> list[list[int]]:
    """Requests at which a curve changes, as distances from the one before, and the values from there on."""
    at = np.nonzero(np.diff(values, prepend=-1))[0]
    return [np.diff(at, prepend=0).tolist(), values[at].tolist()]


@contextmanager
def _figure(step: _Step, title: str, path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """Axes over the time of a step with its phases on top, saved when all is drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 36])
    figure.suptitle(title)
    start = step.trace.phase_start
    for kind, color in enumerate(KINDS.values()):
        phases = np.nonzero(step.kinds == kind)[0]
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
    values = np.append(values, values[-1:])  # the last one lasts to the end of the step
    times = np.arange(len(values))
    if look.style == "area":
        axes.fill_between(times, values, step="post", color=look.color, linewidth=0, label=label)
    else:
        axes.step(times, values, where="post", color=look.color, linestyle=look.style, linewidth=1.2, label=label)


def _legend(figure: Any, axes: Any) -> None:
    """Names the kinds of phases, and what has a label, below the axes."""
    from matplotlib.patches import Patch

    kinds = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=kinds, loc="outside lower center", ncols=len(kinds), frameon=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False)


def _hash(template: str, tag: str) -> str:
    """The page's own style and script are allowed by their hashes, so that no others count."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _for_script(document: dict[str, Any]) -> str:
    """JSON that can't end the element that it stands in, whatever names are in it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
