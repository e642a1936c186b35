"""The states of memory planning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_memo.artifacts.buffer_placement import StepPlacement


class MemoryState(Enum):
    """What the memory planner does. Transitions happen at the end of an optimizer step."""

    BUILDING = "waits until the allocator is compiled"
    RECORDING = "records the requests of each step"
    SOLVING = "waits for the placement, which is computed in the background"
    DRAINING = "waits until the buffers of an earlier placement are freed"
    SERVING = "serves the requests of each step at their offsets"
    GIVEN_UP = "leaves all requests to PyTorch's allocator, because something failed"
    CLOSED = "has ended"


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A placement that is going to be served."""

    placement: StepPlacement
    origin: str = ""
    """Where it comes from, for the message, if it was not computed for this run."""

    solved_here: bool = False
