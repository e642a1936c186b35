"""A part of the cases of a run: `--part 2/10` leaves out all but the second tenth of those that markers select.

CI runs another part for each commit where all cases would take too long.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import pytest


class Part(NamedTuple):
    """One of several parts of about the same size."""

    number: int
    """From 1 to `parts`."""

    parts: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Return the part of a text like 2/6.

        Raises:
            pytest.UsageError: It is none.
        """
        number, slash, parts = text.partition("/")
        if not (slash and number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
            raise pytest.UsageError(f"--part {text}: give one of several parts, like 2/10 for the second tenth")
        return cls(int(number), int(parts))

    def __contains__(self, case: object) -> bool:
        return zlib.crc32(str(case).encode()) % self.parts == self.number - 1

    def select(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the cases of other parts."""
        chosen: dict[bool, Sequence[pytest.Item]] = {
            ours: [item for item in items if (item.nodeid in self) is ours] for ours in (True, False)
        }
        config.hook.pytest_deselected(items=chosen[False])
        items[:] = chosen[True]
