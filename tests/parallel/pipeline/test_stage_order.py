"""The order of forwards and backwards on the stages of a pipeline, and the division of layers over them."""

from __future__ import annotations

import itertools

import pytest

from lightning_memo.parallel.pipeline.stage_modules import stage_layer_counts
from lightning_memo.parallel.pipeline.stage_order import (
    StageAction,
    forwards_only,
    most_in_flight,
    one_by_one,
    training_order,
)


def _needs(stage: int, stages: int, blocks: int, action: StageAction) -> tuple[int, StageAction] | None:
    """Return the stage and the action whose result an action waits for; `None` for the begin of a forward."""
    number, block = action.micro_batch, action.block
    if not action.backward:
        if stage > 0:
            return stage - 1, action
        return (stages - 1, StageAction(number, block=block - 1)) if block > 0 else None
    if stage < stages - 1:
        return stage + 1, action
    if block < blocks - 1:
        return 0, StageAction(number, True, block + 1)
    return stage, StageAction(number, block=block)


def _ends(orders: list[list[StageAction]], blocks: int = 1) -> int:
    """Run all stages, whose actions take one unit of time each, and return when the last one ends."""
    stages, times = len(orders), dict[tuple[int, StageAction], int]()
    free, waiting = [0] * stages, [list(order) for order in orders]
    while any(waiting):
        before = len(times)
        for stage, actions in enumerate(waiting):
            if not actions:
                continue
            needs = _needs(stage, stages, blocks, actions[0])
            if needs is not None and needs not in times:
                continue
            earliest = 0 if needs is None else times[needs]
            free[stage] = times[stage, actions.pop(0)] = max(free[stage], earliest) + 1
        assert len(times) > before, "the stages wait for each other"
    return max(times.values())


def _runs_each_action_once(order: list[StageAction], blocks: int, micro_batches: int) -> bool:
    """Return whether each forward and backward is there once, each forward before its backward."""
    every = itertools.product(range(micro_batches), (False, True), range(blocks))
    position = {action: number for number, action in enumerate(order)}
    forwards = [action for action in order if not action.backward]
    return (
        len(order) == len(position)
        and {*order} == {StageAction(*action) for action in every}
        and all(position[action] < position[StageAction(action.micro_batch, True, action.block)] for action in forwards)
    )


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_1f1b_ends_as_early_as_possible_and_holds_few_micro_batches(stages: int, micro_batches: int) -> None:
    orders = [training_order(stage, stages, micro_batches) for stage in range(stages)]
    # The bubble is one forward and backward of each other stage.
    assert _ends(orders) == 2 * (micro_batches + stages - 1)
    for stage, order in enumerate(orders):
        assert _runs_each_action_once(order, 1, micro_batches)
        assert most_in_flight(stage, stages) == (stages - stage,)
        in_flight = list(itertools.accumulate(-1 if action.backward else 1 for action in order))
        assert max(in_flight) == min(stages - stage, micro_batches)


@pytest.mark.parametrize("blocks", [2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_interleaved_blocks_have_a_smaller_bubble(stages: int, blocks: int) -> None:
    for micro_batches in range(1, 4 * stages + 3):
        orders = [training_order(stage, stages, micro_batches, blocks) for stage in range(stages)]
        rounded = -(-micro_batches // stages) * stages
        ends, ideal = _ends(orders, blocks), 2 * (blocks * rounded + stages - 1)
        assert ends == ideal if micro_batches == rounded else ends <= ideal
        for stage, order in enumerate(orders):
            assert _runs_each_action_once(order, blocks, micro_batches)
            for block, most in enumerate(most_in_flight(stage, stages, blocks)):
                own = [action for action in order if action.block == block]
                counts = list(itertools.accumulate(-1 if action.backward else 1 for action in own))
                # Micro-batches end in the order in which they began, so that each takes the memory of an earlier one.
                assert max(counts) == most if micro_batches >= 4 * stages else max(counts) <= most
                assert [a.micro_batch for a in own if a.backward] == [*range(micro_batches)]


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_messages_are_received_in_the_order_in_which_they_are_sent(stages: int, blocks: int) -> None:
    for micro_batches, order_of in itertools.product(
        (1, stages, 2 * stages + 1),
        (lambda *of: training_order(*of), lambda _, stages, count, blocks: forwards_only(count, stages, blocks)),
    ):
        orders = [order_of(stage, stages, micro_batches, blocks) for stage in range(stages)]
        for backward, stage in itertools.product((False, True), range(stages)):
            sender = (stage + 1 if backward else stage - 1) % stages
            received = [_needs(stage, stages, blocks, a) for a in orders[stage] if a.backward is backward]
            asked = [needs[1] for needs in received if needs is not None and needs[0] == sender != stage]
            assert asked == [a for a in orders[sender] if a in asked]


@pytest.mark.parametrize("blocks", [1, 3])
def test_one_by_one_holds_a_single_micro_batch(blocks: int) -> None:
    order = one_by_one(3, blocks)
    assert _ends([order] * 4, blocks) == 3 * 2 * 4 * blocks
    assert _runs_each_action_once(order, blocks, 3)
    assert max(itertools.accumulate(-1 if action.backward else 1 for action in order)) == blocks


@pytest.mark.parametrize("after", [0.0, 1.0, 2.4, 9.0])
@pytest.mark.parametrize("costs", [(1.0,) * 7, (1.0, 1.0, 3.0, 1.0, 2.0, 1.0), (5.0, 1.0, 1.0, 1.0)])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_slowest_stage_is_as_fast_as_possible(stages: int, costs: tuple[float, ...], after: float) -> None:
    def sizes(counts: tuple[int, ...]) -> list[float]:
        stops = list(itertools.accumulate(counts))
        own = [sum(costs[stop - count : stop]) for count, stop in zip(counts, stops, strict=True)]
        own[-1] += after
        return own

    every = [c for c in itertools.product(range(1, len(costs) + 1), repeat=stages) if sum(c) == len(costs)]
    counts = stage_layer_counts(costs, stages, after)
    assert counts in every
    assert max(sizes(counts)) == min(max(sizes(other)) for other in every)


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    assert stage_layer_counts((1.0,) * 8, 2) == (4, 4)
    assert stage_layer_counts((1.0,) * 8, 2, after=2.4) == (5, 3)
