"""The schedule of a step: a picture like figure 11 of the MEMO paper, and a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_memo.artifacts.timeline import COMPUTE, RECOMPUTE, Span, Timeline
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import format_bytes

_COLORS: Final = {
    "forward": "#56a0d3",
    "backward": "#e8834a",
    "recompute": "#009e73",
    "offload": "#cc79a7",
    "prefetch": "#e69f00",
    "spill": "#8c6bb1",
    "unspill": "#b59b00",
    "wait": "#000000",
    "outside": "#d9d9d9",
}
_ATTENTION: Final = {"forward": "#0b5394", "backward": "#a63f0a", "recompute": "#00573f"}
_LEGEND: Final = {
    "forward": _COLORS["forward"],
    "backward": _COLORS["backward"],
    "recomputation": _COLORS["recompute"],
    "waiting for a copy": _COLORS["wait"],
    "outside the layers": _COLORS["outside"],
    "attention, forward": _ATTENTION["forward"],
    "attention, backward": _ATTENTION["backward"],
}
_PALE: Final = 0.3  # opacity of the backward during recomputation
_HALF: Final = 0.38  # half of the height of a bar, in lanes
_DPI: Final = 110
_WIDTH_INCHES, _LANE_INCHES, _DIGIT_INCHES, _LINED_INCHES = 14.0, 0.75, 0.075, 0.04
_PLOT_INCHES: Final = 0.9 * _WIDTH_INCHES  # approximate width of the axes
_COPY_INCHES: Final = 1.5 / _DPI  # minimum width of a copy, so that it is visible


def draw_schedule(timeline: Timeline, path: str | os.PathLike[str], title: str = "A training step") -> None:
    """Draw a PNG of the computation, recomputation and copies of a step over time, with layer indices.

    Args:
        timeline: The step.
        path: The file. Its folder is created if missing.
        title: Name of the step.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # the import takes a second, and only few runs draw
    from matplotlib.patches import Patch

    lanes = timeline.lanes
    figure = Figure(figsize=(_WIDTH_INCHES, 1.6 + _LANE_INCHES * len(lanes)), layout="constrained")
    axes = figure.subplots()
    drawing = _Drawing(axes, timeline, {lane: -number for number, lane in enumerate(lanes)})
    drawing.draw_computation()
    for lane in lanes[2:]:
        drawing.draw_copies(lane)
    figure.suptitle(f"{title}: {_summary(timeline)}")
    axes.set_xlim(0, timeline.seconds or 1)
    axes.set_ylim(0.35 - len(lanes), 0.5)
    axes.set_yticks([-number for number in range(len(lanes))], [_label(lane, timeline) for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time (seconds from the start of the step); numbers are layer indices")
    axes.grid(visible=True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    patches = [Patch(color=color, label=label) for label, color in _LEGEND.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    with replacing(Path(path)) as unfinished:
        figure.savefig(unfinished, format="png", dpi=_DPI)


@dataclass(frozen=True)
class _Drawing:
    """Draws bars on lanes; `heights` are the centers of the lanes."""

    axes: Any
    timeline: Timeline
    heights: dict[str, int]

    def draw_computation(self) -> None:
        """Draw recomputation on a lane of its own, and pale on the compute lane. Waits are black."""
        whole = [(0.0, self.timeline.seconds)]
        self._boxes(COMPUTE, whole, _COLORS["outside"], inset=0.25)
        found = _by_place(self.timeline.spans)
        for call in ("forward", "backward"):
            calls, again = found[call, COMPUTE, call], found["recompute", RECOMPUTE, call]
            self._boxes(COMPUTE, _boxes_of(calls), _COLORS[call])
            self._boxes(COMPUTE, _boxes_of(again), "#ffffff")
            self._boxes(COMPUTE, _boxes_of(again), _COLORS[call], alpha=_PALE)
            self._boxes(COMPUTE, _boxes_of(found["attention", COMPUTE, call]), _ATTENTION[call], inset=0.2)
            self._boxes(RECOMPUTE, _boxes_of(again), _COLORS["recompute"])
            attention = _boxes_of(found["attention", RECOMPUTE, call])
            self._boxes(RECOMPUTE, attention, _ATTENTION["recompute"], inset=0.2)
            self._numbers(COMPUTE, calls)
            self._numbers(RECOMPUTE, again)
        for (kind, lane, _), spans in found.items():
            if kind == "wait":
                self._boxes(lane, _boxes_of(spans), _COLORS["wait"])

    def draw_copies(self, lane: str) -> None:
        copies = [span for span in self.timeline.spans if span.lane == lane]
        least = _COPY_INCHES * self._seconds_per_inch
        boxes = [(span.start_seconds, max(span.seconds, least)) for span in copies]
        self._boxes(lane, boxes, _COLORS.get(lane, "#777777"))
        self._numbers(lane, copies)

    def _boxes(
        self, lane: str, boxes: Sequence[tuple[float, float]], color: str, alpha: float = 1.0, inset: float = 0.0
    ) -> None:
        bottom, height = self.heights[lane] - _HALF + inset, 2 * (_HALF - inset)
        self.axes.broken_barh(boxes, (bottom, height), facecolors=color, alpha=alpha, linewidth=0)

    @property
    def _seconds_per_inch(self) -> float:
        return (self.timeline.seconds or 1.0) / _PLOT_INCHES

    def _numbers(self, lane: str, spans: Sequence[Span]) -> None:
        """Draw the indices of the layers where there is room, and lines between layers."""
        low, high = self.heights[lane] - _HALF, self.heights[lane] + _HALF
        free_from = -1.0
        for layer, start, stop in _runs(spans):
            if stop - start > _LINED_INCHES * self._seconds_per_inch:
                self.axes.vlines([start, stop], low, high, color="white", linewidth=0.6)
            middle, half = (start + stop) / 2, _DIGIT_INCHES * len(str(layer)) / 2 * self._seconds_per_inch
            if layer is not None and middle - half > free_from:
                free_from = middle + half
                self.axes.text(middle, low - 0.02, layer, ha="center", va="top", fontsize=7, color="#333333")


def _by_place(spans: Iterable[Span]) -> defaultdict[tuple[str, str, str], list[Span]]:
    """Group the spans of the computation by kind, by the lane that shows them, and by the enclosing call."""
    found = defaultdict[tuple[str, str, str], list[Span]](list)
    call, again = None, None  # spans of the computation are nested and sorted by start
    for span in spans:
        if span.lane not in (COMPUTE, RECOMPUTE):
            continue
        if span.kind == "forward" or span.kind == "backward":
            call = span
        elif span.kind == "recompute":
            again = span
        inside_call = call is not None and span.start_seconds < call.stop_seconds
        inside_again = again is not None and span.start_seconds < again.stop_seconds
        kind = call.kind if call is not None and inside_call else ""
        found[span.kind, RECOMPUTE if inside_again else COMPUTE, kind].append(span)
    return found


def _boxes_of(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return [(span.start_seconds, span.seconds) for span in spans]


def _runs(spans: Sequence[Span]) -> list[tuple[int | None, float, float]]:
    """Merge consecutive spans of one layer; returns layer, start and end of each."""
    runs: list[tuple[int | None, float, float]] = []
    for span in spans:
        if runs and runs[-1][0] == span.layer:
            runs[-1] = (span.layer, runs[-1][1], max(runs[-1][2], span.stop_seconds))
        else:
            runs.append((span.layer, span.start_seconds, span.stop_seconds))
    return runs


def _summary(timeline: Timeline) -> str:
    waited = timeline.waited_seconds
    total = sum(waited.values())
    share = 100 * total / timeline.seconds if timeline.seconds else 0.0
    parts = ", ".join(f"{seconds:.3f} s for {stream}" for stream, seconds in sorted(waited.items()))
    waits = f" ({parts})" if parts else ""
    return f"{timeline.seconds:.3f} s, of which {share:.1f} % is spent waiting for copies{waits}"


def _label(lane: str, timeline: Timeline) -> str:
    if lane in (COMPUTE, RECOMPUTE):
        return lane
    copied, seconds = timeline.copied_bytes.get(lane, 0), timeline.copied_seconds.get(lane, 0.0)
    rate = f"\n{format_bytes(round(copied / seconds))}/s" if seconds else ""
    return f"{lane}\n{format_bytes(copied)}{rate}"


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a step in Chrome's trace event format.

    Args:
        timeline: The step.
        path: The file. Its folder is created if missing.

    Raises:
        OSError: The file cannot be written.
    """
    events: list[dict[str, Any]] = [_metadata("process_name", 0, name="step")]
    for number, lane in enumerate(timeline.lanes):
        events.append(_metadata("thread_name", number, name=lane))
        events.append(_metadata("thread_sort_index", number, sort_index=number))
    numbers = {lane: number for number, lane in enumerate(timeline.lanes)}
    events += [_event(span, numbers[span.lane]) for span in timeline.spans]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _metadata(kind: str, lane: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": lane, "args": arguments}


def _event(span: Span, lane: int) -> dict[str, Any]:
    """A complete event. Times are in microseconds."""
    known = {
        "layer": span.layer,
        "slice": span.part,
        "stream": span.stream or None,
        "bytes": span.size_bytes if span.kind == "copy" else None,
    }
    return {
        "name": _name(span),
        "cat": span.kind,
        "ph": "X",
        "ts": 1e6 * span.start_seconds,
        "dur": 1e6 * span.seconds,
        "pid": 0,
        "tid": lane,
        "args": {name: value for name, value in known.items() if value is not None},
    }


def _name(span: Span) -> str:
    if span.kind == "wait":
        return f"wait for {span.stream}"
    words = [] if span.kind == "slice" else [span.lane if span.kind == "copy" else span.kind]
    words += [] if span.layer is None else [f"layer {span.layer}"]
    words += [] if span.part is None else [f"slice {span.part}"]
    return " ".join(words)
