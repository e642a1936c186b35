"""A part of the cases of a run: `--part 2/10` leaves out all but the second tenth of those that markers select.

CI runs another part for each commit where all cases would take too long.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import pytest


class Part(NamedTuple):
    """One of several parts of the same size."""

    number: int
    """From 1 to `parts`."""

    parts: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Return the part of a text like 2/10.

        Raises:
            pytest.UsageError: It is none.
        """
        number, slash, parts = text.partition("/")
        if not (slash and number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
            raise pytest.UsageError(f"--part {text}: give one of several parts, like 2/10 for the second tenth")
        return cls(int(number), int(parts))

    def select(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the cases of other parts."""
        # By checksums of their names, so that cases of one test are in several parts, which differ by one in size.
        order = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
        ours = set(order[self.number - 1 :: self.parts])
        config.hook.pytest_deselected(items=[item for item in items if item not in ours])
        items[:] = [item for item in items if item in ours]
