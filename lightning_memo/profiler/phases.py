"""Names and numbers of the phases of a training step, for the planned allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from lightning_memo.profiler.step_trace import Events, RecordedStep


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
