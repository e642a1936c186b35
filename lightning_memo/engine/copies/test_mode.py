"""The engine's test mode: what brings out copy races."""

from __future__ import annotations

import random
from dataclasses import dataclass


class Delays:
    """Random delays before copies, to bring out a missing wait. Part of the engine's test mode."""

    def __init__(self, seed: int, longest_seconds: float) -> None:
        self._random = random.Random(seed)
        self._longest_seconds = longest_seconds

    def seconds(self) -> float:
        return self._random.uniform(0.0, self._longest_seconds)


@dataclass(frozen=True, slots=True)
class TestMode:
    """Brings out copy races: copies are delayed at random, and every released buffer is filled with NaN.

    Attributes:
        seed: Seed of the delays.
        longest_delay_seconds: Upper bound of one delay.
    """

    __test__ = False  # not a test case, whatever its name

    seed: int = 0
    longest_delay_seconds: float = 0.002


def delays_of(test_mode: TestMode | None, stream: int) -> Delays | None:
    """Delays of one of several streams, each with a seed of its own."""
    return None if test_mode is None else Delays(test_mode.seed + stream, test_mode.longest_delay_seconds)
