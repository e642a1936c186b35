"""Watches the memory of steps that run by a plan: of the device, against the user's budget, and of the host."""

from __future__ import annotations

from typing import Final

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine import Engine
from lightning_memo.profiler.memory_meter import Precedence
from lightning_memo.reports.tables import step_shortage
from lightning_memo.runtime.activation_planner import ActivationPlanner
from lightning_memo.runtime.step_meter import MetersSteps
from lightning_memo.runtime.training_run import TrainingRun
from lightning_memo.utils.free_memory import available_host_bytes
from lightning_memo.utils.units import format_bytes

_CHECK_BATCHES: Final = 10
_RESERVE_BYTES: Final = 2**30


class DeviceMemoryWatch(MetersSteps):
    """Measures the first batch of each plan, and warns once if it takes more device memory than the user's budget.

    A plan is made from a step in which every layer was recomputed; what other steps take is an estimate. With planned
    memory, the arena is larger than the buffers that are alive in it at once.

    Args:
        engine: The engine of the run.
        planner: Makes the plans. Its hooks are called before those of this class.
        run: The training run.
    """

    def __init__(self, engine: Engine, planner: ActivationPlanner, run: TrainingRun) -> None:
        self._engine, self._planner, self._run = engine, planner, run
        self._measured: SwapPlan | None = None
        self._step_bytes = 0  # peak of the measured batch, model state included

    def begin_batch(self) -> None:
        """A training batch begins."""
        plan = self._planner.plan
        if plan is None or plan.swap is self._measured or not self._planner.follows_plan:
            return
        self._measured, self._step_bytes = plan.swap, 0
        if plan.device_excess_bytes == 0:  # otherwise the user has been warned already
            self.start_meter(self._engine, Precedence.LATER_STEP)

    def end_batch(self) -> None:
        """A training batch is over."""
        plan, step_bytes = self._planner.plan, 0
        if plan is None or plan.swap is not self._measured:  # a larger batch was profiled in the meantime
            self._stop()
        elif self._meter is not None:
            always = plan.costs.fixed_device_bytes + plan.swap.memory.buffer_bytes
            step_bytes = self._step_bytes = always + self._stop()
        elif self._step_bytes and plan.placement is not None:
            step_bytes = self._step_bytes + plan.placement.arena_bytes - plan.placement.lower_bound_bytes
            self._step_bytes = 0
        if plan is not None and (shortage := step_shortage(plan, step_bytes)):
            rank_zero_warn(f"lightning_memo: {shortage}.")
            self._step_bytes = 0

    def fail(self) -> None:
        """Training ends with an exception."""
        self._stop()

    def _stop(self) -> int:
        """Peak bytes apart from model state and buffers; 0 if they are not known."""
        measured = self.stop_meter(accumulating=self._run.accumulated_batches > 1)
        return 0 if measured is None else max(measured.layers, measured.outside)


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
