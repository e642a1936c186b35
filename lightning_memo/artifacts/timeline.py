"""Recorded timeline of a training step: computation, copies, and the time that computation waited for copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

COMPUTE: Final = "compute"
"""Lane of the computation. Lanes of copies are named after their streams."""
RECOMPUTE: Final = "recompute"
"""Lane of the recomputation within a layer's backward."""

SpanKind = Literal["forward", "backward", "slice", "attention", "recompute", "copy", "wait"]


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of a lane.

    Spans of the computation are nested: attention within a slice, a slice within a layer's forward.

    Attributes:
        lane: `COMPUTE`, `RECOMPUTE`, or the name of a copy stream.
        kind: Kind of activity.
        layer: Index of the layer call, counted from the model's input; `None` outside the layers.
        part: Index of the slice of tokens within the call; `None` for all tokens.
        start_seconds: Seconds from the start of the step to the start of the activity.
        stop_seconds: Seconds from the start of the step to the end of the activity.
        size_bytes: Bytes that a copy moved.
        stream: Copy stream that a wait was for.
    """

    lane: str
    kind: SpanKind
    layer: int | None
    part: int | None
    start_seconds: float
    stop_seconds: float
    size_bytes: int = 0
    stream: str = ""

    @property
    def seconds(self) -> float:
        return self.stop_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """The activities of one step.

    Attributes:
        seconds: Duration of the step.
        spans: Activities in the order of their start.
    """

    seconds: float
    spans: tuple[Span, ...]

    @property
    def lanes(self) -> tuple[str, ...]:
        """All lanes: first those that every step has, then further streams."""
        known = (COMPUTE, RECOMPUTE, "offload", "prefetch")
        return known + tuple(sorted({span.lane for span in self.spans}.difference(known)))

    @property
    def waited_seconds(self) -> dict[str, float]:
        """Seconds that the computation waited for each copy stream, which is the exposed part of the copies."""
        return _total((span.stream, span.seconds) for span in self.spans if span.kind == "wait")

    @property
    def copied_seconds(self) -> dict[str, float]:
        """Seconds that each stream copied."""
        return _total((span.lane, span.seconds) for span in self.spans if span.kind == "copy")

    @property
    def copied_bytes(self) -> dict[str, int]:
        """Bytes that each stream copied."""
        return {
            lane: sum(span.size_bytes for span in self.spans if (span.kind, span.lane) == ("copy", lane))
            for lane in self.copied_seconds
        }


def _total(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for name, seconds in parts:
        totals[name] += seconds
    return dict(totals)
