"""The order of forwards and backwards on the stages of a pipeline, and the division of layers over them."""

from __future__ import annotations

import itertools

import pytest

from lightning_memo.parallel.pipeline.divide_layers import divide_layers
from lightning_memo.parallel.pipeline.stage_order import (
    StageAction,
    most_in_flight,
    one_by_one,
    one_forward_one_backward,
)


def _ends(orders: list[list[StageAction]]) -> int:
    """Run all stages, whose actions take one unit of time each, and return when the last one ends."""
    stages, times = len(orders), dict[tuple[int, StageAction], int]()
    free, waiting = [0] * stages, [list(order) for order in orders]
    while any(waiting):
        before = len(times)
        for stage, actions in enumerate(waiting):
            if not actions:
                continue
            action = actions[0]
            neighbour = stage + 1 if action.backward else stage - 1
            needs = (neighbour, action) if 0 <= neighbour < stages else (stage, StageAction(action.micro_batch))
            if (action.backward or neighbour >= 0) and needs not in times:
                continue
            free[stage] = times[stage, actions.pop(0)] = max(free[stage], times.get(needs, 0)) + 1
        assert len(times) > before, "the stages wait for each other"
    return max(times.values())


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_1f1b_ends_as_early_as_possible_and_holds_few_micro_batches(stages: int, micro_batches: int) -> None:
    orders = [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]
    assert _ends(orders) == 2 * (
        micro_batches + stages - 1
    )  # the bubble is one forward and backward of each other stage
    for stage, order in enumerate(orders):
        assert sorted(order, key=lambda a: (a.backward, a.micro_batch)) == [
            StageAction(number, backward) for backward in (False, True) for number in range(micro_batches)
        ]
        in_flight = list(itertools.accumulate(-1 if action.backward else 1 for action in order))
        assert max(in_flight) == min(most_in_flight(stage, stages), micro_batches)


def test_one_by_one_holds_a_single_micro_batch() -> None:
    assert _ends([one_by_one(3)] * 4) == 3 * 2 * 4
    assert max(itertools.accumulate(-1 if action.backward else 1 for action in one_by_one(3))) == 1


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
    counts = divide_layers(costs, stages, after)
    assert counts in every
    assert max(sizes(counts)) == min(max(sizes(other)) for other in every)


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    assert divide_layers((1.0,) * 8, 2) == (4, 4)
    assert divide_layers((1.0,) * 8, 2, after=2.4) == (5, 3)
