"""The engine's test mode, which reveals copy races with random delays and poisoned buffers."""

from __future__ import annotations

import random
from dataclasses import dataclass


class Delays:
    """Random delays before copies, which reveal a missing wait.

    Args:
        seed: Seed of the delays.
        longest_seconds: Upper bound of a delay.
    """

    def __init__(self, seed: int, longest_seconds: float) -> None:
        self._random = random.Random(seed)
        self._longest_seconds = longest_seconds

    def seconds(self) -> float:
        """Return the next delay."""
        return self._random.uniform(0.0, self._longest_seconds)


@dataclass(frozen=True, slots=True)
class TestMode:
    """Settings of the test mode: copies are delayed at random, and every released buffer is filled with NaN.

    Attributes:
        seed: Seed of the delays.
        longest_delay_seconds: Upper bound of a delay.
    """

    __test__ = False  # pytest takes a class of this name for a test case

    seed: int = 0
    longest_delay_seconds: float = 0.002


def delays_of(test_mode: TestMode | None, stream: int) -> Delays | None:
    """Return the delays of stream number `stream`, with a seed of its own; `None` outside of test mode."""
    return None if test_mode is None else Delays(test_mode.seed + stream, test_mode.longest_delay_seconds)
