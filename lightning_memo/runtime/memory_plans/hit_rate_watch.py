"""Watches whether the steps still make the requests that were planned."""

from __future__ import annotations

from typing import Final

from lightning_memo.allocator import AllocatorStats

_WATCHED_STEPS: Final = 10  # The first step of a plan is examined, and then each interval of so many steps.
_MISSED_SHARE: Final = 0.01  # If the arena is too small for more requests than these, steps need more than was planned.


class HitRateWatch:
    """Compares the allocator's counters from step to step, from the step at which a plan begins to be served.

    Requests that miss their places are no reason to plan again as long as the arena serves them. For example, a buffer
    that is sent to another process lives until that process has received it.

    Args:
        repeats: Whether the steps that the plan was made from made the same requests. Its places are then expected to
            be used; otherwise it is enough if requests find room in the arena.
    """

    def __init__(self, repeats: bool = True) -> None:
        self._repeats = repeats
        self._steps = 0
        self._before: AllocatorStats | None = None

    def is_due(self) -> bool:
        """Whether the step that is over is one of those to be examined."""
        self._steps += 1
        return self._steps == 1 or self._steps % _WATCHED_STEPS == 0

    def plan_is_wrong(self, stats: AllocatorStats) -> bool:
        """Whether the plan should be made anew.

        Args:
            stats: The counters at the end of a step.
        """
        if self._steps == 1:
            good = stats.hits if self._repeats else stats.served
            return stats.served + stats.misses > 2 * good
        if self._steps % _WATCHED_STEPS:
            return False
        before, self._before = self._before, stats
        without_room = _without_room(stats) - (0 if before is None else _without_room(before))
        return without_room > _MISSED_SHARE * (stats.served - (0 if before is None else before.served))


def _without_room(stats: AllocatorStats) -> int:
    return stats.displaced - stats.fitted
