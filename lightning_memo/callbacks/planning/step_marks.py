"""Tells the allocator which phase of a training step begins, from the hooks that the step passes."""

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
    """Marks the phases of steps, once it is started; one step may have several batches.

    What lies between batches, like data loading and validation, belongs to no phase.
    """

    def __init__(self) -> None:
        self._phases = StepPhases(lambda number: None)
        self._started = self._in_step = self._in_batch = False

    def start(self, begin_phase: Callable[[int], None], names: Sequence[str] = ()) -> None:
        """The next batch begins a step; `begin_phase` is told the number of each phase, those of `names` in order."""
        self._phases, self._started = StepPhases(begin_phase, names), True

    def stop(self) -> None:
        """Later batches are not marked."""
        self._started = False

    def begin_batch(self) -> None:
        if not self._started:
            return
        if not self._in_step:
            self._phases.begin_step()
        self._in_step = self._in_batch = True
        self._phases.mark("input")

    def layer(self, index: int, name: str) -> None:
        """A layer call begins or ends something; see `Engine.mark`."""
        if name in _LAYER_PHASES:
            self._mark(_LAYER_PHASES[name].format(index))

    def before_backward(self, loss: torch.Tensor) -> None:
        if not (self._in_batch and loss.requires_grad):
            return
        if loss.is_cpu:
            self._mark("backward")
        else:  # by a hook: the backward runs in a thread of its own, which has to say that it takes part
            loss.register_hook(lambda gradient: self._mark("backward"))

    def after_backward(self) -> None:
        self._mark("optimizer")

    def _mark(self, phase: str) -> None:
        if self._in_batch:
            self._phases.mark(phase)

    def end_batch(self) -> bool:
        """Whether the batch that ends was marked."""
        marked, self._in_batch = self._in_batch, False
        return marked

    def end_step(self) -> None:
        self._in_step = False

    def recorded(self, events: Events) -> RecordedStep:
        """The step so far with its events."""
        return self._phases.recorded(events)

    @property
    def names(self) -> tuple[str, ...]:
        """All phases met so far, by number."""
        return self._phases.names
