"""Records the requests to the allocator in a step, and makes a trace of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.planner.placement.step_placement import problem_of

_MALLOC: Final = 0
Events = npt.NDArray[np.void]


class StepPhases:
    """Numbers the phases of a step and passes each number to the allocator when its phase begins.

    A name that is repeated in a step, for example with several micro-batches, is another phase: "backward 2" follows
    "backward".

    Args:
        begin_phase: Called with the number of each phase when it begins.
        names: Names of phases that are numbered already, in this order; further phases get the next numbers.
    """

    def __init__(self, begin_phase: Callable[[int], None], names: Sequence[str] = ()) -> None:
        self._begin_phase = begin_phase
        self._number = {name: number for number, name in enumerate(names)}
        self._seen: Counter[str] = Counter()
        self._order: list[int] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all phases so far, by number."""
        return tuple(self._number)

    def begin_step(self) -> None:
        """Begin a step."""
        self._seen.clear()
        self._order = []

    def mark(self, name: str) -> None:
        """Begin a phase."""
        self._seen[name] += 1
        if self._seen[name] > 1:
            name = f"{name} {self._seen[name]}"
        number = self._number.setdefault(name, len(self._number))
        self._order.append(number)
        self._begin_phase(number)

    def recorded(self, events: Events) -> RecordedStep:
        """Return the phases of the step so far together with its events."""
        return RecordedStep(events, tuple(self._order))


@dataclass(frozen=True)
class RecordedStep:
    """A step that the allocator recorded.

    Attributes:
        events: Events of type `allocator.EVENT`: those since the end of the previous step, and then those of the step.
        phases: Numbers of the step's phases, in order.
    """

    events: Events
    phases: tuple[int, ...]


def trace_of(step: RecordedStep, following: RecordedStep, names: Sequence[str]) -> Trace:
    """Return the trace of a step that was recorded together with the next one.

    Args:
        step: The step.
        following: The next step, in which buffers such as gradients are freed. Its requests may differ from those of
            `step`. The time of a free in it is therefore given by the phase and by the number of the phase's requests
            before the free.
        names: Names of the phases, by number.
    """
    timeline = _Timeline(step)
    death = np.full(len(timeline), NEVER, np.int64)
    for phase, sequence, row in timeline.frees(step.events):
        # Buffers of this step are freed outside of phases only after the last phase.
        at = len(timeline) if phase < 0 else timeline.time(phase, sequence)
        death[row] = max(at, row + 1)
    begins = np.argmax(following.events["phase"] >= 0) if len(following.events) else 0
    for _, _, row in timeline.frees(following.events[:begins]):  # between the steps
        death[row] = len(timeline)
    for phase, sequence, row in timeline.frees(following.events[begins:]):
        if phase in timeline.position and (at := timeline.time(phase, sequence)) <= row:
            death[row] = at
    return Trace(
        phases=tuple(names[phase] for phase in step.phases),
        phase=timeline.phase,
        size=timeline.mallocs["size"].astype(np.int64),
        death=death,
        lane=timeline.lane,
    )


class _Timeline:
    """The requests of a step in order, and the times of its phases."""

    def __init__(self, step: RecordedStep) -> None:
        self.position = {phase: position for position, phase in enumerate(step.phases)}
        mallocs = step.events[step.events["kind"] == _MALLOC]
        phase = np.array([self.position[phase] for phase in mallocs["phase"].tolist()], np.int64)
        order = np.argsort(phase, kind="stable")  # threads may record slightly out of order
        self.mallocs, self.phase = mallocs[order], phase[order]
        self._row = {own: row for row, own in enumerate(self.mallocs["id"].tolist())}
        self._start = np.searchsorted(self.phase, np.arange(len(step.phases) + 1))
        self._in_lane = [
            start + np.nonzero(self.mallocs["sequence"][start:end] >= 0)[0]
            for start, end in zip(self._start[:-1], self._start[1:], strict=True)
        ]

    def __len__(self) -> int:
        return len(self.mallocs)

    @property
    def lane(self) -> npt.NDArray[np.int64]:
        """`[requests]`: 0 for requests that can be planned, and a number per stream for the others."""
        planned = self.mallocs["sequence"] >= 0
        streams = {
            stream: 1 + number for number, stream in enumerate(dict.fromkeys(self.mallocs["stream"][~planned].tolist()))
        }
        others = [streams.get(stream, 0) for stream in self.mallocs["stream"].tolist()]
        return np.where(planned, 0, np.array(others, np.int64))

    def time(self, phase: int, sequence: int) -> int:
        """Return the number of requests before the plannable request number `sequence` of a phase."""
        position = self.position[phase]
        rows = self._in_lane[position]
        return int(rows[sequence]) if sequence < len(rows) else int(self._start[position + 1])

    def frees(self, events: Events) -> Iterator[tuple[int, int, int]]:
        """Iterate over frees: the phase, its number of requests before the free, and the row of the freed request."""
        frees = events[events["kind"] != _MALLOC]
        columns = (frees[name].tolist() for name in ("phase", "sequence", "id"))
        for phase, sequence, own in zip(*columns, strict=True):
            if own in self._row:
                yield phase, sequence, self._row[own]


_LEAST_STEPS: Final = 3
_MOST_STEPS: Final = 8

_LAYER_PHASES: Final = {
    "forward_begin": "layer {} forward",
    "forward_end": "after layer {} forward",
    "backward_begin": "layer {} backward",
    "backward_end": "after layer {} backward",
}


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """The requests for which memory is planned."""

    trace: Trace
    """The requests of the step that needs most memory."""

    room_bytes: int = 0
    """How much more memory the next step is expected to need that exceeds all recorded ones."""

    varying: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By name of the phase, the sizes of which the recorded steps made different numbers of requests."""

    occasional: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By name of the phase, the sizes that some of the recorded steps did not request."""


class RequestRecording:
    """The memory requests of consecutive steps.

    Args:
        alignment: Bytes that offsets are multiples of.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._steps: list[RecordedStep] = []
        self._traces: list[Trace] = []

    def add(self, step: RecordedStep, phases: Sequence[str]) -> RecordedRequests | None:
        """Add the requests of a step.

        Args:
            step: The recorded events.
            phases: Names of the phases by number.

        Returns:
            The requests of the last but one step, once three steps in a row made the same ones; after 8 steps, those of
            the step that needs most memory. `None` if more steps have to be recorded.
        """
        self._steps.append(step)
        if len(self._steps) > 1:
            self._traces.append(trace_of(self._steps[-2], step, tuple(phases)))
        if len(self._steps) < _LEAST_STEPS:
            return None
        newest = trace_of(step, RecordedStep(step.events[:0], ()), tuple(phases))  # its frees are not known yet
        if all(newest.same_requests(trace) for trace in self._traces[1 - _LEAST_STEPS :]):
            return RecordedRequests(self._with_longest_lives(self._traces[-1]))
        return self._largest() if len(self._steps) >= _MOST_STEPS else None

    def _largest(self) -> RecordedRequests:
        """The trace with the most live bytes. The first step is left out, because it frees buffers of no known step."""
        traces = self._traces[1:]
        needs = [problem_of(trace, self._alignment).lower_bound_bytes for trace in traces]
        most = max(needs)
        # If needs are uniformly distributed, the highest possible one is expected this much above the highest of them.
        room = (most - min(needs)) // (len(needs) - 1)
        return RecordedRequests(self._with_longest_lives(traces[needs.index(most)]), room, *_varying_sizes(traces))

    def _with_longest_lives(self, trace: Trace) -> Trace:
        """Lifetimes differ a little from step to step. For example, a callback may free gradients early."""
        for other in self._traces:
            if trace.same_requests(other):
                trace = trace.longest_lives(other)
        return trace


def _varying_sizes(traces: Sequence[Trace]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The sizes that all traces request in a phase, but not equally often, and those that some do not request."""
    counts = [
        Counter((trace.phases[phase], size) for phase, size, lane in _rows(trace) if lane == 0) for trace in traces
    ]
    varying: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)
    occasional: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)
    for phase, size in sorted(set().union(*counts)):
        found = {count[phase, size] for count in counts}
        if 0 in found:
            occasional[phase] += (size,)
        elif len(found) > 1:
            varying[phase] += (size,)
    return varying, occasional


def _rows(trace: Trace) -> Iterator[tuple[int, int, int]]:
    return zip(trace.phase.tolist(), trace.size.tolist(), trace.lane.tolist(), strict=True)


class StepMarks:
    """Marks the phases of steps after `start`. A step may have several batches.

    What happens between batches, for example loading data and validation, belongs to no phase.
    """

    def __init__(self) -> None:
        self._phases = StepPhases(lambda number: None)
        self._started = self._in_step = self._in_batch = False

    def start(self, begin_phase: Callable[[int], None], names: Sequence[str] = ()) -> None:
        """Mark the phases from the next batch on, which begins a step.

        Args:
            begin_phase: Called with the number of each phase when the phase begins.
            names: Names of known phases, which are numbered in this order.
        """
        self._phases, self._started = StepPhases(begin_phase, names), True

    def stop(self) -> None:
        """Do not mark later batches."""
        self._started = False

    def begin_batch(self) -> None:
        """A batch begins."""
        if not self._started:
            return
        if not self._in_step:
            self._phases.begin_step()
        self._in_step = self._in_batch = True
        self._phases.mark("input")

    def layer(self, index: int, name: str) -> None:
        """A layer call begins or ends its forward or backward; see `Engine.mark`."""
        if name in _LAYER_PHASES:
            self._mark(_LAYER_PHASES[name].format(index))

    def before_backward(self, loss: torch.Tensor | None) -> None:
        """The backward of a loss is about to begin; `None` if it has just begun, in this thread."""
        if not (self._in_batch and (loss is None or loss.requires_grad)):
            return
        if loss is None or loss.is_cpu:
            self._mark("backward")
        else:  # in a hook, because the backward runs in a thread of its own, and the allocator has to know that thread
            loss.register_hook(lambda gradient: self._mark("backward"))  # type: ignore[no-untyped-call]

    def after_backward(self) -> None:
        """The backward is over."""
        self._mark("optimizer")

    def _mark(self, phase: str) -> None:
        if self._in_batch:
            self._phases.mark(phase)

    def end_batch(self) -> bool:
        """A batch ends.

        Returns:
            Whether its phases were marked.
        """
        marked, self._in_batch = self._in_batch, False
        return marked

    def end_step(self) -> None:
        """An optimizer step ends; the next batch begins another one."""
        self._in_step = False

    def recorded(self, events: Events) -> RecordedStep:
        """The phases of the current step together with its events."""
        return self._phases.recorded(events)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all phases so far, by number."""
        return self._phases.names
