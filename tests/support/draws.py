"""Number of random draws: the environment variable `DRAWS` multiplies it.

`DRAWS=20 pytest tests/strategy/test_random_configurations.py` makes twenty times as many draws as by default, and
different ones in each run. By default, the draws are few and always the same.
"""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("DRAWS", "1"))
REPEATABLE = FACTOR == 1.0
"""Whether the draws are the same in each run."""


def draws(default: int) -> int:
    """Return the number of draws of a test that makes `default` of them by default."""
    return max(1, round(default * FACTOR))
