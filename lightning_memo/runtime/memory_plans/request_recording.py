"""Records the memory requests of consecutive steps, until they repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_memo.artifacts.trace import Trace
from lightning_memo.profiler.step_trace import RecordedStep, trace_of

_LEAST_STEPS: Final = 3
_MOST_STEPS: Final = 8


class RequestRecording:
    """The memory requests of consecutive steps."""

    def __init__(self) -> None:
        self._steps: list[RecordedStep] = []

    def add(self, step: RecordedStep, phases: Sequence[str]) -> Trace | None:
        """Add the requests of a step.

        Args:
            step: The recorded events.
            phases: Names of the phases by number.

        Returns:
            The trace of a step, once two steps in a row made the same requests, or after 8 steps at the latest. `None`
            if more steps have to be recorded.
        """
        self._steps.append(step)
        if len(self._steps) < _LEAST_STEPS:
            return None
        first, second, third = self._steps[-_LEAST_STEPS:]
        before, trace = trace_of(first, second, tuple(phases)), trace_of(second, third, tuple(phases))
        if trace.same_requests(before):
            # Lifetimes differ a little from step to step. For example, a callback may free gradients early.
            return trace.longest_lives(before)
        return trace if len(self._steps) >= _MOST_STEPS else None
