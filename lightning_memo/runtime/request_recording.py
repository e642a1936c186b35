"""Numbers the phases of a step, and records its memory requests until they repeat."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from lightning_memo.artifacts.trace import Trace
from lightning_memo.planner.placement.step_placement import problem_of
from lightning_memo.profiler.step_trace import Events, RecordedStep, StepPhases, trace_of

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
