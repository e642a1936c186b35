"""Trace of the schedule of a step, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lightning_memo.artifacts.timeline import Span, Timeline
from lightning_memo.utils.files import replacing


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
