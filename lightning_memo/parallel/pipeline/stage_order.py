"""The order in which a stage of a pipeline runs the forwards and backwards of its micro-batches.

Imports no torch or Lightning.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageAction:
    """A forward of a micro-batch through the layers of a stage, or its backward.

    Attributes:
        micro_batch: Number of the micro-batch in its batch.
        backward: Whether it is the backward.
    """

    micro_batch: int
    backward: bool = False


def most_in_flight(stage: int, stages: int) -> int:
    """Return the largest number of micro-batches whose forward a stage has run and whose backward it has not."""
    return stages - stage


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[StageAction]:
    """Return the order 1F1B: forwards until the first gradient comes back, then a backward after each forward.

    Args:
        stage: Number of the stage.
        stages: Number of stages.
        micro_batches: Number of micro-batches of the batch.
    """
    ahead = min(most_in_flight(stage, stages) - 1, micro_batches)
    actions = [StageAction(number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        actions += [StageAction(number), StageAction(number - ahead, backward=True)]
    return actions + [StageAction(number, backward=True) for number in range(micro_batches - ahead, micro_batches)]


def one_by_one(micro_batches: int) -> list[StageAction]:
    """Return the order in which one micro-batch after the other passes through all stages and back."""
    return [StageAction(number, backward) for number in range(micro_batches) for backward in (False, True)]


def forwards_only(micro_batches: int) -> list[StageAction]:
    """Return the order without backwards."""
    return [StageAction(number) for number in range(micro_batches)]
