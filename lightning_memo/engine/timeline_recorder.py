"""Records when the computation and the copies of a step begin and end, on request, by points in time on the device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lightning_memo.artifacts.timeline import COMPUTE, RECOMPUTE, Span, SpanKind, Timeline

_NOTHING = contextlib.nullcontext()


class Subject(NamedTuple):
    """The layer call, or the slice of a layer call, that a span of time belongs to.

    Attributes:
        layer: Number of the layer call; `None` outside of layers.
        part: Number of the slice; `None` for the complete layer call.
    """

    layer: int | None = None
    part: int | None = None


NOBODY = Subject()


class TimelineRecorder:
    """Records one step at a time, from `start` to `stop`. Otherwise it does nothing, unless waits are counted.

    The host never waits for the device before `stop`. Points in time are CUDA events on the stream whose work they
    time; they are read in `stop`, or once the device has passed them. On a CPU they are wall-clock times taken by the
    computing or copying thread.

    Args:
        device: Where the layers run.
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
        """Whether a step is being recorded."""
        return self._notes is not None

    def start(self) -> None:
        """Begin to record a step. A recording that was not stopped is dropped."""
        self._open.clear()
        self._notes, self._begun, self._times_waits = [], self._clock.now(), True

    def stop(self) -> Timeline:
        """Wait for the end of the step and return its timeline, without copies that are still under way.

        Raises:
            RuntimeError: No step is being recorded.
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
        """The layer call or slice that is being computed."""
        return next(reversed(self._open), ("", NOBODY))[1]

    def begin(self, kind: SpanKind, subject: Subject) -> None:
        """Note that the computation begins a span. Copies belong to the span that began last."""
        if self._notes is not None:
            self._open[kind, subject] = self._clock.now()

    def end(self, kind: SpanKind, subject: Subject) -> None:
        """Note that the computation ends a span. A span that began before the recording is ignored."""
        begun = self._open.pop((kind, subject), None)
        if self._notes is not None and begun is not None:
            lane = RECOMPUTE if kind == "recompute" else COMPUTE
            self._notes.append(_Note(lane, kind, subject, begun, self._clock.now()))

    def mark(self, name: str, subject: Subject) -> None:
        """Note that a layer call begins or ends its forward or backward.

        Args:
            name: "forward_begin", "forward_end", "backward_begin" or "backward_end"; other names are ignored.
            subject: The layer call.
        """
        kind, _, edge = name.rpartition("_")
        if kind == "forward" or kind == "backward":
            (self.begin if edge == "begin" else self.end)(kind, subject)

    def computing(self, kind: SpanKind, subject: Subject | None = None) -> contextlib.AbstractContextManager[None]:
        """Record a span of the computation inside this context, by default for the current layer call or slice."""
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
        """Record a copy on a stream inside this context; on a CPU it runs in the stream's thread."""
        return _NOTHING if self._notes is None else self._copying(stream, size_bytes, subject)

    def waiting(self, stream: str) -> contextlib.AbstractContextManager[None]:
        """Record that the computation waits for a stream inside this context; nested waits are part of it."""
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
        """Count waits from now on, in every step, for `waited_seconds`."""
        self._waits, self._times_waits = deque(), True

    def waited_seconds(self) -> float:
        """Return the seconds that the computation waited for copies since the last call; 0 if waits are not counted.

        Waits that the device has not reached yet are left for the next call. On a GPU, each wait is overestimated by
        the few microseconds between two events.
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


class _Note(NamedTuple):
    lane: str
    kind: SpanKind
    subject: Subject
    begun: Moment
    ended: Moment
    size_bytes: int = 0
    stream: str = ""


Moment = torch.cuda.Event | float


class Clock:
    """Takes points in time on the device: CUDA events on the current stream, or the wall clock on a CPU.

    Args:
        device: Where the layers run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def now(self) -> Moment:
        """Return the present point in time, without waiting for the device."""
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def seconds(start: Moment, stop: Moment) -> float:
        """Return the seconds between two points in time, after waiting until the device has reached `stop`."""
        if isinstance(start, float) or isinstance(stop, float):
            return float(stop) - float(start)
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    @staticmethod
    def has_passed(moment: Moment) -> bool:
        """Return whether the device has reached a point in time."""
        return isinstance(moment, float) or moment.query()
