"""A module of a user that counts in its global variables."""

from __future__ import annotations

COUNT = 0
COUNTS = {"calls": 0}


class Counter:
    """Counts in a class attribute."""

    count = 0

    def step(self) -> int:
        type(self).count += 1
        return self.count


def step() -> int:
    """Count, and return how often."""
    return _add(1)


def _add(number: int) -> int:
    global COUNT
    COUNT += number
    return COUNT
