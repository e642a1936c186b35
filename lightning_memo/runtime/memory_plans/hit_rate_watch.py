"""Watches whether the steps still make the requests that were planned."""

from __future__ import annotations

from typing import Final

from lightning_memo.allocator import AllocatorStats

_WATCHED_STEPS: Final = 10  # The first steps of a plan are all examined, later ones at this interval.
# A buffer that is sent to another process lives until that process has received it. A few lifetimes that differ are
# therefore no reason to plan again.
_DISPLACED_SHARE: Final = 0.1
_MISSED_SHARE: Final = 0.01  # If the arena is too small for more requests than these, steps need more than was planned.


class HitRateWatch:
    """Compares the allocator's counters from step to step, from the step at which a plan begins to be served.

    Args:
        repeats: Whether the steps that the plan was made from made the same requests. Its places are then expected to
            be free and used; otherwise it is enough if requests find room in the arena.
    """

    def __init__(self, repeats: bool = True) -> None:
        self._repeats = repeats
        self._steps = 0
        self._before: AllocatorStats | None = None
        self._long_before: AllocatorStats | None = None

    def is_due(self) -> bool:
        """Whether the step that is over is one of those to be examined."""
        self._steps += 1
        return self._steps <= _WATCHED_STEPS or self._steps % _WATCHED_STEPS == 0

    def plan_is_wrong(self, stats: AllocatorStats) -> bool:
        """Whether the plan should be made anew.

        Args:
            stats: The counters at the end of a step.
        """
        before, self._before = self._before, stats
        good = stats.hits if self._repeats else stats.served
        useless = before is None and stats.served + stats.misses > 2 * good
        return useless or (self._repeats and _lives_differ(stats, before)) or self._is_too_small(stats)

    def _is_too_small(self, stats: AllocatorStats) -> bool:
        """Whether requests found no room in the arena, as those of longer batches, on average over several steps."""
        if self._steps % _WATCHED_STEPS:
            return False
        before, self._long_before = self._long_before, stats
        without_room = _since(before, stats, "displaced") - _since(before, stats, "fitted")
        return without_room > _MISSED_SHARE * _since(before, stats, "served")


def _lives_differ(stats: AllocatorStats, before: AllocatorStats | None) -> bool:
    """Whether the requests are the planned ones, as all sizes match, but many places are not free."""
    wrong_sizes = _since(before, stats, "miss_size") + _since(before, stats, "miss_end")
    return not wrong_sizes and _since(before, stats, "miss_overlap") > _DISPLACED_SHARE * _since(before, stats, "hits")


def _since(before: AllocatorStats | None, stats: AllocatorStats, name: str) -> int:
    """The difference of a counter from an earlier one."""
    return int(getattr(stats, name)) - (0 if before is None else int(getattr(before, name)))
