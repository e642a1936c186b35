"""Watches the host's free memory while training runs."""

from __future__ import annotations

from typing import Final

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memo.engine import Engine
from lightning_memo.runtime.activation_plans.activation_planner import ActivationPlanner
from lightning_memo.utils.free_host_memory import available_host_bytes
from lightning_memo.utils.units import format_bytes

_CHECK_BATCHES: Final = 10
_RESERVE_BYTES: Final = 2**30


class HostMemoryWatch:
    """Shrinks the plan if other programs take the host's memory, before the kernel ends the process.

    Args:
        engine: The engine, which holds activations on the host.
        planner: Makes the plans. Its `end_batch` is called after the one of this class, so that a batch that is being
            profiled is left alone.
    """

    def __init__(self, engine: Engine, planner: ActivationPlanner) -> None:
        self._engine, self._planner = engine, planner

    def end_batch(self, batch: int) -> None:
        """A training batch is over.

        Args:
            batch: Its index in the epoch.
        """
        profile, held = self._engine.profile, self._engine.host_bytes
        profiled = profile is not None and profile.complete
        if batch % _CHECK_BATCHES or profiled or not held or not self._planner.can_shrink:
            return
        left = available_host_bytes()
        if left < min(_RESERVE_BYTES, held // 16):
            rank_zero_warn(
                f"lightning_memo: the host has {format_bytes(left)} left, so the {format_bytes(held)} for swapped "
                "activations are given back, and the next batch is planned with less: see what else runs, or set "
                "host_memory."
            )
            self._planner.shrink()
