"""Reports to the allocator which phase of a training step begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from lightning_memo.profiler.phases import StepPhases
from lightning_memo.profiler.step_trace import Events, RecordedStep

_LAYER_PHASES: Final = {
    "forward_begin": "layer {} forward",
    "forward_end": "after layer {} forward",
    "backward_begin": "layer {} backward",
    "backward_end": "after layer {} backward",
}


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
