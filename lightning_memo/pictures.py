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
    parts = {
        "SUMMARY": html.escape(step.summary),
        "DETAILS": html.escape(
            f"{len(step.placed):,} of {len(trace):,} requests have a place; found by: {placement.method}"
        ),
        "STYLE": _STYLE,
        "STYLE_HASH": _hash(_STYLE),
        "SCRIPT": _SCRIPT,
        "SCRIPT_HASH": _hash(_SCRIPT),
        "DATA": _for_script(step.document),
    }
    page = re.sub(r"@(\w+)@", lambda found: parts[found[1]], _PAGE)
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


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


def _hash(text: str) -> str:
    """The page's own code is allowed by its hash, so that no other can run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _for_script(document: dict[str, Any]) -> str:
    """JSON that can't end the element that it stands in, whatever names are in it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src '@SCRIPT_HASH@'; style-src '@STYLE_HASH@'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Memory of a training step</title>
<style>@STYLE@</style>
</head>
<body>
<header>
<h1>Memory of a training step: @SUMMARY@</h1>
<p>@DETAILS@</p>
<p id="kinds" class="legend"></p>
<p>
<button id="in" type="button">Zoom in</button>
<button id="out" type="button">Zoom out</button>
<button id="whole" type="button">Whole step</button>
<small>Wheel: zoom, with Shift only time. Drag: pan. Double click: whole step. Keys on the map: arrows,
<kbd>+</kbd>, <kbd>-</kbd>, <kbd>0</kbd> for the whole step, <kbd>n</kbd> and <kbd>p</kbd> for the next and the
previous buffer.</small>
</p>
</header>
<canvas id="map" tabindex="0" role="img" aria-label="Map: address of every buffer over the step. n and p go through
 the buffers, arrows pan, plus and minus zoom."></canvas>
<canvas id="curves" role="img" aria-label="Curves of memory over the step; their names and peaks are below."></canvas>
<p id="lines" class="legend"></p>
<p id="details" role="status">Point at a buffer.</p>
<noscript>The pictures need JavaScript; nothing is loaded from elsewhere.</noscript>
<div id="tip" hidden></div>
<script type="application/json" id="data">@DATA@</script>
<script>@SCRIPT@</script>
</body>
</html>
"""

_STYLE: Final = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --faint: #767676; --grid: #e2e2e2; }
@media (prefers-color-scheme: dark) {
  :root { --back: #161616; --text: #ececec; --faint: #9a9a9a; --grid: #333; }
}
body { margin: 0; padding: 0.6rem 1rem; background: var(--back); color: var(--text);
  font: 14px/1.4 system-ui, sans-serif; display: flex; flex-direction: column; height: 100vh;
  min-height: 560px; box-sizing: border-box; }
h1 { font-size: 1.15rem; margin: 0; }
p { margin: 0.2rem 0; }
canvas { width: 100%; display: block; touch-action: none; }
canvas:focus-visible { outline: 2px solid #0072b2; }
#map { flex: 3 1 0; min-height: 200px; cursor: crosshair; }
#curves { flex: 1.4 1 0; min-height: 120px; cursor: crosshair; }
.legend { display: flex; flex-wrap: wrap; gap: 0.1rem 1.1rem; }
.legend i { display: inline-block; width: 18px; margin-right: 0.35rem; }
.legend .area { height: 12px; vertical-align: -1px; }
.legend .line { vertical-align: 3px; }
#details { min-height: 2.8em; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
#tip { position: fixed; max-width: 24rem; padding: 0.3rem 0.5rem; background: var(--back); color: var(--text);
  border: 1px solid var(--faint); border-radius: 4px; pointer-events: none; white-space: pre-line;
  overflow-wrap: anywhere; font-size: 13px; box-shadow: 0 1px 6px #0004; }
"""

_SCRIPT: Final = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const map = byId("map"), curves = byId("curves"), tip = byId("tip"), details = byId("details");
const count = data.size.length, kindColors = Object.values(data.kinds);
const LEFT = 84, RIGHT = 12, STRIP = 16, BOTTOM = 36, CURVES_TOP = 8, NEVER = -1;
const top_ = Math.max(data.peak, data.bound, 1) * 1.04;
const view = { t0: 0, t1: Math.max(count, 1), a0: 0, a1: top_ };
let chosen = -1, time = -1;

const size = (row) => data.sizes[data.size[row]];
const isOther = new Set(data.lane);

// The phase of a request: the last one that starts at it or before.
function phaseOf(row) {
  let low = 0, high = data.phases.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (data.start[middle] <= row) low = middle; else high = middle;
  }
  return low;
}

const phases = new Uint32Array(count);
for (let phase = 0; phase < data.phases.length; phase++) phases.fill(phase, data.start[phase], data.start[phase + 1]);

// Rectangles: a life over the end of the step has two.
const placed = [], pieces = [];
for (let row = 0; row < count; row++) {
  if (data.offset[row] < 0) continue;
  placed.push(row);
  const death = data.death[row] === 0 ? count : data.death[row];
  const wraps = death <= row;
  pieces.push({ row, start: row, end: wraps ? count : death });
  if (wraps) pieces.push({ row, start: 0, end: death });
}
const styles = new Uint8Array(count);
for (const row of placed) styles[row] = data.kind[phases[row]] * data.shades.length + row % data.shades.length;
pieces.sort((one, other) => styles[one.row] - styles[other.row]);

// Curves come as the requests at which they change, and their values from there on.
const lines = data.curves.map(({ label, color, style, values: [steps, values] }) => {
  let at = 0;
  const times = steps.map((step) => (at += step));
  return { label, color, style, times, values, peak: values.reduce((most, value) => Math.max(most, value), 0) };
});
const highest = Math.max(1, ...lines.map((line) => line.peak)) * 1.06;

// The last change at a time or before.
function indexAt(line, when) {
  let low = -1, high = line.times.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (line.times[middle] <= when) low = middle; else high = middle;
  }
  return low;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function unitOf(bytes) {
  let power = 0;
  while (bytes >= 1024 && power < UNITS.length - 1) { bytes /= 1024; power++; }
  return [1024 ** power, UNITS[power]];
}
function formatBytes(bytes) {
  let [unit, name] = unitOf(bytes);
  if (unit === 1) return `${bytes} B`;
  if (bytes / unit >= 1023.95 && name !== "TiB") [unit, name] = unitOf(unit * 1024);
  return `${(bytes / unit).toFixed(1)} ${name}`;
}
const grouped = (number) => number.toLocaleString("en-US");

// ---- drawing

// What changes only with the view is drawn here, and copied when the pointer moves.
const still = new Map([[map, document.createElement("canvas")], [curves, document.createElement("canvas")]]);

// Clears `canvas`, which is to be as large as `like`.
function prepare(canvas, like) {
  const ratio = window.devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = like;
  const wanted = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wanted[0] || canvas.height !== wanted[1]) [canvas.width, canvas.height] = wanted;
  const context = canvas.getContext("2d"), css = getComputedStyle(document.documentElement);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  const color = (name) => css.getPropertyValue(`--${name}`).trim();
  return { context, width, height, text: color("text"), faint: color("faint"), grid: color("grid") };
}

const plotWidth = () => Math.max(map.clientWidth - LEFT - RIGHT, 1);
const xOf = (when) => LEFT + (when - view.t0) / (view.t1 - view.t0) * plotWidth();
const timeAt = (x) => view.t0 + (x - LEFT) / plotWidth() * (view.t1 - view.t0);
const mapHeight = () => Math.max(map.clientHeight - STRIP - BOTTOM, 1);
const yOf = (address) => STRIP + (view.a1 - address) / (view.a1 - view.a0) * mapHeight();
const addressAt = (y) => view.a1 - (y - STRIP) / mapHeight() * (view.a1 - view.a0);

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * base).find((one) => one >= rough);
  const found = [];
  for (let index = Math.ceil(low / step); index * step <= high; index++) found.push(index * step);
  return [found, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}

// Grid and labels of both axes; `y` turns bytes into a place on the canvas.
function axes({ context, width, height, text, grid }, low, high, y, plotTop, title) {
  const bottom = height - BOTTOM, [unit, name] = unitOf(high);
  context.strokeStyle = grid; context.fillStyle = text; context.lineWidth = 1;
  context.textAlign = "right"; context.textBaseline = "middle";
  const [levels, digits] = ticks(low / unit, high / unit, Math.max((bottom - plotTop) / 40, 2));
  context.beginPath();
  for (const level of levels) {
    const at = y(level * unit);
    context.moveTo(LEFT, at); context.lineTo(width - RIGHT, at);
    context.fillText(level.toFixed(digits), LEFT - 6, at);
  }
  context.textAlign = "center"; context.textBaseline = "top";
  const [times, decimals] = ticks(view.t0, view.t1, Math.max(plotWidth() / 110, 2));
  for (const when of times) {
    if (decimals) continue;
    context.moveTo(xOf(when), plotTop); context.lineTo(xOf(when), bottom);
    context.fillText(grouped(when), xOf(when), bottom + 4);
  }
  context.stroke();
  context.fillText("time (requests)", LEFT + plotWidth() / 2, bottom + 19);
  context.save();
  context.translate(12, (plotTop + bottom) / 2); context.rotate(-Math.PI / 2);
  context.textBaseline = "middle";
  context.fillText(`${title} (${name})`, 0, 0);
  context.restore();
}

function clipped(context, left, top, width, height, draw) {
  context.save();
  context.beginPath(); context.rect(left, top, width, height); context.clip();
  draw();
  context.restore();
}

function drawStrip({ context }) {
  context.textAlign = "left"; context.textBaseline = "middle";
  clipped(context, LEFT, 0, plotWidth(), STRIP - 2, () => {
    for (let phase = 0; phase < data.phases.length; phase++) {
      const start = data.start[phase], end = data.start[phase + 1];
      if (end === start || end < view.t0 || start > view.t1) continue;
      const left = xOf(start), width = Math.max(xOf(end) - left, 0.5);
      context.fillStyle = kindColors[data.kind[phase]];
      context.fillRect(left, 0, width, STRIP - 2);
      const seen = Math.max(left, LEFT);
      if (left + width - seen < context.measureText(data.phases[phase].slice(0, 80)).width + 8) continue;
      context.fillStyle = "#fff";
      context.fillText(data.phases[phase].slice(0, 80), seen + 4, (STRIP - 2) / 2);
    }
  });
}

function drawPieces({ context }) {
  let last = -1;
  for (const { row, start, end } of pieces) {
    const low = data.offset[row], high = low + size(row);
    if (end < view.t0 || start > view.t1 || high < view.a0 || low > view.a1) continue;
    if (styles[row] !== last) {
      last = styles[row];
      context.fillStyle = kindColors[Math.floor(last / data.shades.length)];
      context.globalAlpha = data.shades[last % data.shades.length];
    }
    const left = xOf(start), top = yOf(high);
    context.fillRect(left, top, Math.max(xOf(end) - left, 0.4), Math.max(yOf(low) - top, 0.4));
  }
  context.globalAlpha = 1;
}

function drawOutline({ context, text }) {
  context.strokeStyle = text; context.lineWidth = 2;
  for (const { row, start, end } of pieces) {
    if (row !== chosen) continue;
    const top = yOf(data.offset[row] + size(row));
    context.strokeRect(xOf(start), top, xOf(end) - xOf(start), yOf(data.offset[row]) - top);
  }
}

function drawLevel({ context, width }, address, dash, color) {
  const at = yOf(address);
  context.strokeStyle = color; context.lineWidth = dash.length ? 1.2 : 3;
  context.setLineDash(dash);
  context.beginPath(); context.moveTo(LEFT, at); context.lineTo(width - RIGHT, at); context.stroke();
  context.setLineDash([]);
}

function drawCrosshair({ context, faint }, top, bottom) {
  if (time < view.t0 || time > view.t1) return;
  context.strokeStyle = faint; context.lineWidth = 1;
  context.beginPath(); context.moveTo(xOf(time), top); context.lineTo(xOf(time), bottom); context.stroke();
}

function drawMap() {
  const paper = prepare(still.get(map), map);
  axes(paper, view.a0, view.a1, yOf, STRIP, "address");
  drawStrip(paper);
  clipped(paper.context, LEFT, STRIP, plotWidth(), mapHeight(), () => {
    drawPieces(paper);
    drawLevel(paper, data.peak, [], paper.faint);
    drawLevel(paper, data.bound, [7, 5], paper.text);
  });
}

function drawCurves() {
  const paper = prepare(still.get(curves), curves), { context, height, text } = paper;
  const top = CURVES_TOP, bottom = height - BOTTOM, y = (bytes) => bottom - bytes / highest * (bottom - top);
  axes(paper, 0, highest, y, top, "memory");
  clipped(context, LEFT, top, plotWidth(), bottom - top, () => {
    for (const line of lines) {
      const first = Math.max(indexAt(line, view.t0), 0);
      context.strokeStyle = context.fillStyle = line.color === "#000000" ? text : line.color;
      context.lineWidth = 1.5;
      context.setLineDash(line.style === "dashed" ? [6, 5] : []);
      context.beginPath();
      let level = null;
      for (let index = first; index < line.times.length && line.times[index] <= view.t1; index++) {
        const x = xOf(line.times[index]);
        if (level !== null) context.lineTo(x, level); else if (line.style === "area") context.moveTo(x, bottom);
        level = y(line.values[index]);
        context.lineTo(x, level);
      }
      if (level !== null) context.lineTo(xOf(count), level);
      if (line.style !== "area") { context.stroke(); continue; }
      context.lineTo(xOf(count), bottom);
      context.fill();
    }
    context.setLineDash([]);
  });
}

// What follows the pointer.
function drawMarks(canvas, top) {
  const paper = prepare(canvas, canvas), { context, width, height } = paper;
  context.drawImage(still.get(canvas), 0, 0, width, height);
  clipped(context, LEFT, top, plotWidth(), height - BOTTOM - top, () => {
    if (canvas === map) drawOutline(paper);
    drawCrosshair(paper, top, height - BOTTOM);
  });
}

let asked = false, stale = true;
function frame() {
  asked = false;
  if (stale) { drawMap(); drawCurves(); }
  stale = false;
  drawMarks(map, STRIP);
  drawMarks(curves, CURVES_TOP);
}
function refresh() {
  if (!asked) requestAnimationFrame(frame);
  asked = true;
}
function redraw() { stale = true; refresh(); }

// ---- what is under the pointer, in words

function nameOf(phase) { return `"${data.phases[phase].slice(0, 120)}"`; }

function deathOf(row) {
  const death = data.death[row];
  if (death === count || death === 0) return "at the end of the step";
  const when = `${nameOf(phases[death - 1])}, before request ${grouped(death)}`;
  return death <= row ? `in the next step, ${when}` : `in ${when}`;
}

function describe(row) {
  const bytes = size(row);
  return [
    `${formatBytes(bytes)} (${grouped(bytes)} bytes) at ${formatBytes(data.offset[row])}`
      + ` (${grouped(data.offset[row])})`,
    `born: ${nameOf(phases[row])}, request ${grouped(row)}`,
    `dies: ${deathOf(row)}`,
  ];
}

function describeTime(when) {
  const row = Math.min(Math.max(Math.floor(when), 0), count - 1);
  if (row < 0) return [];
  const bytes = size(row), fate = data.offset[row] >= 0 ? "" : isOther.has(row) ? ", of another stream"
    : data.death[row] === NEVER ? ", not freed within a step, so without a place" : ", without a place";
  return [
    `request ${grouped(row)}: ${formatBytes(bytes)} (${grouped(bytes)} bytes)${fate}`,
    `phase: ${nameOf(phases[row])}`,
    ...lines.map((line) => `${line.label}: ${formatBytes(line.values[indexAt(line, row)] ?? 0)}`),
  ];
}

function hit(x, y) {
  const when = timeAt(x), address = addressAt(y);
  const found = pieces.find(({ row, start, end }) =>
    start <= when && when < end && data.offset[row] <= address && address < data.offset[row] + size(row));
  return found ? found.row : -1;
}

function show(words, x, y) {
  details.textContent = words.join("; ") || "Point at a buffer.";
  tip.hidden = x === undefined || !words.length;
  if (tip.hidden) return;
  tip.textContent = words.join("\n");
  tip.style.left = `${Math.max(0, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
}

function point(canvas, event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const inside = x >= LEFT && x <= LEFT + plotWidth();
  time = inside ? timeAt(x) : -1;
  chosen = inside && canvas === map && y >= STRIP && y < STRIP + mapHeight() ? hit(x, y) : -1;
  const words = chosen >= 0 ? describe(chosen) : inside ? describeTime(time) : [];
  show(words, event.clientX, event.clientY);
  refresh();
}

// ---- moving around

const limits = { t: [0, Math.max(count, 1), 4], a: [0, top_, Math.min(512, top_)] };

function setRange(axis, low, high) {
  const [least, most, smallest] = limits[axis];
  const span = Math.min(Math.max(high - low, Math.min(smallest, most)), most - least);
  const start = Math.min(Math.max((low + high - span) / 2, least), most - span);
  view[`${axis}0`] = start; view[`${axis}1`] = start + span;
  redraw();
}

function zoom(axis, factor, around) {
  const low = view[`${axis}0`], high = view[`${axis}1`], fixed = around ?? (low + high) / 2;
  setRange(axis, fixed - (fixed - low) * factor, fixed + (high - fixed) * factor);
}

function pan(axis, share) {
  const low = view[`${axis}0`], high = view[`${axis}1`], by = share * (high - low);
  const [least, most] = limits[axis], moved = Math.min(Math.max(by, least - low), most - high);
  setRange(axis, low + moved, high + moved);
}

function whole() { setRange("t", ...limits.t); setRange("a", ...limits.a); }
function zoomBoth(factor) { zoom("t", factor); zoom("a", factor); }

// The next or the previous buffer in the order of birth, brought into view.
function step(by) {
  if (!placed.length) return;
  const start = placed.findIndex((row) => row >= (chosen >= 0 ? chosen : view.t0));
  const at = chosen >= 0 ? start + by : start;
  chosen = placed[(at + placed.length) % placed.length];
  time = -1;
  const low = data.offset[chosen], high = low + size(chosen);
  if (chosen < view.t0 || chosen > view.t1) {
    const half = (view.t1 - view.t0) / 2;
    setRange("t", chosen - half, chosen + half);
  }
  if (high < view.a0 || low > view.a1) {
    const half = (view.a1 - view.a0) / 2, middle = (low + high) / 2;
    setRange("a", middle - half, middle + half);
  }
  show(describe(chosen));
  refresh();
}

let grabbed = null;
for (const canvas of [map, curves]) {
  canvas.addEventListener("pointerdown", (event) => {
    grabbed = { x: event.clientX, y: event.clientY };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (grabbed) {
      pan("t", (grabbed.x - event.clientX) / plotWidth());
      if (canvas === map) pan("a", (event.clientY - grabbed.y) / mapHeight());
      grabbed = { x: event.clientX, y: event.clientY };
    }
    point(canvas, event);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { grabbed = null; });
  canvas.addEventListener("pointerleave", () => { if (!grabbed) { time = -1; tip.hidden = true; refresh(); } });
  canvas.addEventListener("dblclick", whole);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), amount = event.deltaY || event.deltaX;
    const factor = Math.exp(Math.max(-1, Math.min(1, amount * 0.002)));
    zoom("t", factor, timeAt(event.clientX - box.left));
    if (canvas === map && !event.shiftKey) zoom("a", factor, addressAt(event.clientY - box.top));
    point(canvas, event);
  }, { passive: false });
}

const keys = {
  ArrowLeft: () => pan("t", -0.2), ArrowRight: () => pan("t", 0.2),
  ArrowUp: () => pan("a", 0.2), ArrowDown: () => pan("a", -0.2),
  "+": () => zoomBoth(0.7), "=": () => zoomBoth(0.7), "-": () => zoomBoth(1 / 0.7), "0": whole,
  n: () => step(1), p: () => step(-1),
};
map.addEventListener("keydown", (event) => {
  if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  keys[event.key]();
});
byId("in").addEventListener("click", keys["+"]);
byId("out").addEventListener("click", keys["-"]);
byId("whole").addEventListener("click", whole);

// ---- legends

// A filled sign, or a line that is solid or dashed.
function legend(place, label, color, line) {
  const entry = document.createElement("span"), sign = document.createElement("i");
  if (line) sign.style.borderTop = `3px ${line} ${color}`; else sign.style.background = color;
  sign.className = line ? "line" : "area";
  entry.append(sign, label);
  byId(place).append(entry);
}
for (const [kind, color] of Object.entries(data.kinds)) legend("kinds", kind, color);
legend("kinds", "peak of the plan", "var(--faint)", "solid");
legend("kinds", "lower bound", "var(--text)", "dashed");
for (const { label, color, style, peak } of lines) {
  const line = style === "area" ? "" : style;
  legend("lines", `${label}: ${formatBytes(peak)}`, color === "#000000" ? "var(--text)" : color, line);
}

new ResizeObserver(redraw).observe(map);
new ResizeObserver(redraw).observe(curves);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
"""
