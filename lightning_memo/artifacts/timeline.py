"""What a training step did when: its computation, its copies, and how long the one waited for the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

COMPUTE: Final = "compute"
"""The lane of the computation; those of copies are named after their streams."""
RECOMPUTE: Final = "recompute"
"""The lane of what the computation does a second time, within a layer's backward."""

SpanKind = Literal["forward", "backward", "slice", "attention", "recompute", "copy", "wait"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a lane did.

    Spans of the computation lie one in the other: attention in a slice, a slice in a layer's forward.

    Attributes:
        lane: `COMPUTE`, `RECOMPUTE`, or the name of a stream of copies.
        kind: What it was.
        layer: The layer call that it was for, counted from the model's input; `None`: for none.
        part: The slice of tokens within the call; `None`: for all of them.
        start_seconds: From the start of the step.
        stop_seconds: From the start of the step.
        size_bytes: What a copy moved.
        stream: What a wait was for.
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
    """A step.

    Attributes:
        seconds: How long it took.
        spans: What was done, in the order in which it began.
    """

    seconds: float
    spans: tuple[Span, ...]

    @property
    def lanes(self) -> tuple[str, ...]:
        """All lanes: those that are always there, then further streams."""
        known = (COMPUTE, RECOMPUTE, "offload", "prefetch")
        return known + tuple(sorted({span.lane for span in self.spans}.difference(known)))

    @property
    def waited_seconds(self) -> dict[str, float]:
        """How long the computation waited for each stream of copies: the exposed part of their time."""
        return _total((span.stream, span.seconds) for span in self.spans if span.kind == "wait")

    @property
    def copied_seconds(self) -> dict[str, float]:
        """How long each stream copied."""
        return _total((span.lane, span.seconds) for span in self.spans if span.kind == "copy")

    @property
    def copied_bytes(self) -> dict[str, int]:
        """What each stream copied."""
        return {
            lane: sum(span.size_bytes for span in self.spans if (span.kind, span.lane) == ("copy", lane))
            for lane in self.copied_seconds
        }


def _total(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for name, seconds in parts:
        totals[name] += seconds
    return dict(totals)
