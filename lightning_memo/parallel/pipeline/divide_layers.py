"""Divides the layers of a model over the stages of a pipeline by what they cost. Imports no torch or Lightning."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def divide_layers(costs: Sequence[float], stages: int, after: float = 0.0) -> tuple[int, ...]:
    """Return the number of layers of each stage, so that the stage that costs most costs as little as possible.

    Among divisions with the same largest cost, the one with the smallest sum of squared costs is taken.

    Args:
        costs: Cost of each layer, in order.
        stages: Number of stages, at most as many as layers.
        after: Cost of what the last stage computes after its layers.
    """
    layers = len(costs)
    sums = [0.0, *itertools.accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + after * (stage == stages - 1)

    # Best division of the first `stop` layers over the first stages: largest cost, sum of squares, number of layers.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extended: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, counts) in best.items():
            for stop in range(start + 1, layers - (stages - 1 - stage) + 1):
                own = cost(stage, start, stop)
                candidate = (max(largest, own), squares + own * own, (*counts, stop - start))
                if stop not in extended or candidate < extended[stop]:
                    extended[stop] = candidate
        best = extended
    return best[layers][2]
