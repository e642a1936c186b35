"""Order of rows in which the data-parallel processes compute rows of about the same cost at the same time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_WINDOW = 64  # batches whose rows are exchanged: larger ones are more even, and less random


def balanced_order(costs: npt.NDArray[Any], batch_size: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Returns a random order of rows, in which the rows of a batch cost about the same.

    Rows are shuffled and divided into windows. In each window, rows of neighbouring costs make up a batch, and the
    batches are shuffled. So the slowest process of a step waits for no other, and steps of all costs alternate.

    Args:
        costs: Cost of each row.
        batch_size: Number of rows in a batch of all processes. An incomplete last batch is at the end.
        random: Source of the order.
    """
    shuffled = random.permutation(len(costs))
    whole = len(costs) // batch_size * batch_size
    parts = []
    for start in range(0, whole, _WINDOW * batch_size):
        window = shuffled[start : min(start + _WINDOW * batch_size, whole)]
        by_cost = window[np.argsort(costs[window], kind="stable")]
        parts.append(random.permutation(by_cost.reshape(-1, batch_size)).ravel())
    return np.concatenate([*parts, shuffled[whole:]])
