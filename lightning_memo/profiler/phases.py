"""Names and numbers of the phases of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from lightning_memo.profiler.step_trace import Events, RecordedStep


class StepPhases:
    """Tells the allocator which phase of a step begins.

    A name that comes again in the same step, as with several micro-batches, is another phase: "backward", "backward 2".

    Args:
        begin_phase: Told the number of each phase as it begins.
        names: Phases that are known already, numbered in this order; others get numbers as they come.
    """

    def __init__(self, begin_phase: Callable[[int], None], names: Sequence[str] = ()) -> None:
        self._begin_phase = begin_phase
        self._number = {name: number for number, name in enumerate(names)}
        self._seen: Counter[str] = Counter()
        self._order: list[int] = []

    @property
    def names(self) -> tuple[str, ...]:
        """All phases met so far, by number."""
        return tuple(self._number)

    def begin_step(self) -> None:
        self._seen.clear()
        self._order = []

    def mark(self, name: str) -> None:
        """A phase begins."""
        self._seen[name] += 1
        if self._seen[name] > 1:
            name = f"{name} {self._seen[name]}"
        number = self._number.setdefault(name, len(self._number))
        self._order.append(number)
        self._begin_phase(number)

    def recorded(self, events: Events) -> RecordedStep:
        """The step so far with its events."""
        return RecordedStep(events, tuple(self._order))
