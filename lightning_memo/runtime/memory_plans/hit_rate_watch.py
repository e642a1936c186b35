"""Watches whether the steps still make the requests that were planned."""

from __future__ import annotations

from typing import Final

from lightning_memo.allocator import AllocatorStats

_WATCHED_STEPS: Final = 10  # The first steps of a plan are all examined, later ones at this interval.
# A buffer that is sent to another process lives until that process has received it. A few lifetimes that differ are
# therefore no reason to plan again.
_MISSED_SHARE: Final = 0.1


class HitRateWatch:
    """Compares the allocator's counters from step to step, from the step at which a plan begins to be served."""

    def __init__(self) -> None:
        self._steps = 0
        self._before: AllocatorStats | None = None

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
        useless = before is None and stats.misses > stats.hits
        # If all sizes match, the requests are the planned ones. Misses then mean that lifetimes differ.
        wrong_sizes = stats.miss_size + stats.miss_end - (before.miss_size + before.miss_end if before else 0)
        overlaps = stats.miss_overlap - (before.miss_overlap if before else 0)
        hits = stats.hits - (before.hits if before else 0)
        return useless or (not wrong_sizes and overlaps > _MISSED_SHARE * hits)
