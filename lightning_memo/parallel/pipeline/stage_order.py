"""The order in which a stage of a pipeline runs the forwards and backwards of its micro-batches.

Imports no torch or Lightning.

Note: [Interleaved order]
With several blocks of layers, micro-batches pass through the ring of stages once for each block (Narayanan et al. 2021,
section 2.2.2). A stage runs the forwards of `stages` micro-batches through its first block, then through the second
one, and so on, before it begins with the next `stages` micro-batches. Backwards have the same order with the blocks
reversed. All stages have the same order of forwards and of backwards, so that messages arrive in the order in which
they are asked for. If `stages` does not divide the number of micro-batches, the order is that of the next multiple
without the micro-batches that do not exist: no more of them are in flight, and some stages wait.

Note: [Zero-bubble order]
A stage waits for the gradients of hidden states, and not for those of weights (Qi et al. 2023). Stage `s` computes
those of weights `s` backwards later, in which time the stages before it get their gradients (ZB-H1, section 2.2). The
first stage, for which none waits, computes them in the backward. Stages have as many activations as in 1F1B, and the
inputs and output gradients of linear layers of the backwards whose weights wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

_ROUNDS = 4  # of micro-batches, after which the numbers in flight repeat


@dataclass(frozen=True, slots=True)
class StageAction:
    """A forward of a micro-batch through a block of layers of a stage, its backward, or the gradients of weights.

    Attributes:
        micro_batch: Number of the micro-batch in its batch.
        backward: Whether it is the backward.
        block: Number of the block among those of the stage.
        weights: Whether it is the gradients of weights, which the backward left out.
    """

    micro_batch: int
    backward: bool = False
    block: int = 0
    weights: bool = False


def most_in_flight(stage: int, stages: int, blocks: int = 1) -> tuple[int, ...]:
    """Return, for each block, the largest number of micro-batches whose forward has run and whose backward has not.

    Args:
        stage: Number of the stage.
        stages: Number of stages.
        blocks: Number of blocks of layers of each stage.
    """
    alive, most = Counter[int](), Counter[int]()
    for action in training_order(stage, stages, _ROUNDS * stages, blocks):
        alive[action.block] += -1 if action.backward else 1
        most[action.block] = max(most[action.block], alive[action.block])
    return tuple(most[block] for block in range(blocks))


def most_waiting(stage: int) -> int:
    """Return the largest number of backwards whose gradients of weights wait in a zero-bubble order.

    Args:
        stage: Number of the stage.
    """
    return stage + 1 if stage else 0


def training_order(
    stage: int, stages: int, micro_batches: int, blocks: int = 1, zero_bubble: bool = False
) -> list[StageAction]:
    """Return the order 1F1B: forwards until the first gradient comes back, then a backward after each forward.

    Args:
        stage: Number of the stage.
        stages: Number of stages.
        micro_batches: Number of micro-batches of the batch.
        blocks: Number of blocks of layers of each stage.
        zero_bubble: Whether gradients of weights are computed later than those of hidden states.
    """
    if zero_bubble and stage:
        return _with_weights(training_order(stage, stages, micro_batches, blocks), stage)
    later = stages - stage - 1
    if blocks == 1:
        return _alternate([StageAction(number) for number in range(micro_batches)], later, blocks)
    rounded = -(-micro_batches // stages) * stages
    order = _alternate(forwards_only(rounded, stages, blocks), 2 * later + (blocks - 1) * stages, blocks)
    return [action for action in order if action.micro_batch < micro_batches]


def one_by_one(micro_batches: int, blocks: int = 1, weights_wait: bool = False) -> list[StageAction]:
    """Return the order in which one micro-batch after the other passes through all stages and back.

    Args:
        micro_batches: Number of micro-batches of the batch.
        blocks: Number of blocks of layers of each stage.
        weights_wait: Whether the gradients of weights come after each backward, and not in it.
    """
    if weights_wait:
        return _with_weights(one_by_one(micro_batches, blocks), 0)
    forth = [StageAction(0, block=block) for block in range(blocks)]
    both = [*forth, *(replace(action, backward=True) for action in reversed(forth))]
    return [replace(action, micro_batch=number) for number in range(micro_batches) for action in both]


def forwards_only(micro_batches: int, stages: int, blocks: int = 1) -> list[StageAction]:
    """Return the order without backwards."""
    return [
        StageAction(number, block=block)
        for first in range(0, micro_batches, stages)
        for block in range(blocks)
        for number in range(first, min(first + stages, micro_batches))
    ]


def _alternate(forwards: Sequence[StageAction], ahead: int, blocks: int) -> list[StageAction]:
    """Return forwards and backwards in turn, after some forwards."""
    backwards = [StageAction(action.micro_batch, True, blocks - 1 - action.block) for action in forwards]
    ahead = min(ahead, len(forwards))
    actions = [*forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - ahead :]


def _with_weights(order: Sequence[StageAction], later: int) -> list[StageAction]:
    """Return an order with gradients of weights some backwards later."""
    actions: list[StageAction] = []
    waiting: deque[StageAction] = deque()
    for action in order:
        actions.append(action)
        if action.backward:
            waiting.append(replace(action, backward=False, weights=True))
            if len(waiting) > later:
                actions.append(waiting.popleft())
    return [*actions, *waiting]
