"""The phases of a training step, and the conversion of the allocator's events to the trace of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_memo.artifacts.trace import NEVER, Trace

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
