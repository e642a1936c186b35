"""Records when computation and copies of a step begin and end, where someone asked for it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lightning_memo.artifacts.timeline import COMPUTE, RECOMPUTE, Span, SpanKind, Timeline
from lightning_memo.engine.copies.clock import Clock, Moment

_NOTHING = contextlib.nullcontext()


class Subject(NamedTuple):
    """What something is done for: a layer call, or one of its slices."""

    layer: int | None = None
    part: int | None = None


NOBODY = Subject()


class _Note(NamedTuple):
    lane: str
    kind: SpanKind
    subject: Subject
    begun: Moment
    ended: Moment
    size_bytes: int = 0
    stream: str = ""


class StepRecorder:
    """Records one step at a time, from `start` to `stop`; beside that it does nothing, unless waits are to be counted.

    The host never waits for the device before `stop`: points in time are CUDA events, which are read then, or when the
    device has passed them. They are recorded on the stream that they tell of. On a CPU it is the wall clock, read by
    whoever computes or copies.

    Args:
        device: Where layers run.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._notes: list[_Note] | None = None
        self._begun: Moment = 0.0
        self._open: dict[tuple[SpanKind, Subject], Moment] = {}
        self._waiting = False
        self._waits: deque[tuple[Moment, Moment]] | None = None
        self._times_waits = False

    @property
    def on(self) -> bool:
        return self._notes is not None

    def start(self) -> None:
        """A step begins. One that was not stopped is forgotten."""
        self._open.clear()
        self._notes, self._begun, self._times_waits = [], self._clock.now(), True

    def stop(self) -> Timeline:
        """The step is over: wait for its end, and return what was recorded. Copies still under way are left out.

        Raises:
            RuntimeError: No step was started.
        """
        notes, self._notes = self._notes, None
        self._times_waits = self._waits is not None
        self._open.clear()
        if notes is None:
            raise RuntimeError("no step is being recorded: call start before the step")
        end = self._clock.now()
        spans = [self._span(note) for note in list(notes)]
        return Timeline(
            Clock.seconds(self._begun, end), tuple(sorted(spans, key=lambda s: (s.start_seconds, -s.stop_seconds)))
        )

    # ---- the computation

    @property
    def subject(self) -> Subject:
        """What is computed now."""
        return next(reversed(self._open), ("", NOBODY))[1]

    def begin(self, kind: SpanKind, subject: Subject) -> None:
        """The computation begins something; what began last is what copies are for."""
        if self._notes is not None:
            self._open[kind, subject] = self._clock.now()

    def end(self, kind: SpanKind, subject: Subject) -> None:
        """It ends; nothing happens if it began before the step did."""
        begun = self._open.pop((kind, subject), None)
        if self._notes is not None and begun is not None:
            lane = RECOMPUTE if kind == "recompute" else COMPUTE
            self._notes.append(_Note(lane, kind, subject, begun, self._clock.now()))

    def mark(self, name: str, subject: Subject) -> None:
        """A layer call begins or ends its forward or its backward: "forward_begin", ..., "backward_end"."""
        kind, _, edge = name.rpartition("_")
        if kind == "forward" or kind == "backward":
            (self.begin if edge == "begin" else self.end)(kind, subject)

    def computing(self, kind: SpanKind, subject: Subject | None = None) -> contextlib.AbstractContextManager[None]:
        """Inside, the computation does something, by default for what is computed already."""
        return _NOTHING if self._notes is None else self._computing(kind, self.subject if subject is None else subject)

    @contextlib.contextmanager
    def _computing(self, kind: SpanKind, subject: Subject) -> Iterator[None]:
        self.begin(kind, subject)
        try:
            yield
        finally:
            self.end(kind, subject)

    # ---- copies, and waits for them

    def copying(self, stream: str, size_bytes: int, subject: Subject) -> contextlib.AbstractContextManager[None]:
        """Inside, a stream copies, on a CPU in a thread of its own."""
        return _NOTHING if self._notes is None else self._copying(stream, size_bytes, subject)

    def waiting(self, stream: str) -> contextlib.AbstractContextManager[None]:
        """Inside, the computation waits for a stream; waits within are part of it."""
        return self._waiting_for(stream) if self._times_waits and not self._waiting else _NOTHING

    @contextlib.contextmanager
    def _waiting_for(self, stream: str) -> Iterator[None]:
        self._waiting = True
        notes, subject, begun = self._notes, self.subject, self._clock.now()
        try:
            yield
        finally:
            self._waiting = False
        ended = self._clock.now()
        if notes is not None:
            notes.append(_Note(COMPUTE, "wait", subject, begun, ended, stream=stream))
        if self._waits is not None:
            self._waits.append((begun, ended))

    def count_waits(self) -> None:
        """From now on, `waited_seconds` tells how long the computation waits for copies, in any step."""
        self._waits, self._times_waits = deque(), True

    def waited_seconds(self) -> float:
        """How long the computation waited for copies since the last call, as far as the device has come; 0 uncounted.

        On a GPU each wait is told too long by the microseconds between two events.
        """
        seconds = 0.0
        while self._waits and Clock.has_passed(self._waits[0][1]):
            seconds += Clock.seconds(*self._waits.popleft())
        return seconds

    @contextlib.contextmanager
    def _copying(self, stream: str, size_bytes: int, subject: Subject) -> Iterator[None]:
        notes, begun = self._notes, self._clock.now()
        yield
        if notes is not None:
            notes.append(_Note(stream, "copy", subject, begun, self._clock.now(), size_bytes))

    def _span(self, note: _Note) -> Span:
        start, stop = (Clock.seconds(self._begun, moment) for moment in (note.begun, note.ended))
        return Span(note.lane, note.kind, *note.subject, start, stop, note.size_bytes, note.stream)
