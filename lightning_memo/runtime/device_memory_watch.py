"""Compares the device memory that a step takes with the user's budget."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine import Engine
from lightning_memo.reports.memory_shortage import step_shortage
from lightning_memo.runtime.activation_plans.activation_planner import ActivationPlanner
from lightning_memo.runtime.activation_plans.step_meter import MetersSteps
from lightning_memo.runtime.training_run_protocol import TrainingRun


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
        if plan is None or plan.swap is self._measured or self._engine.profile is not None:
            return
        self._measured, self._step_bytes = plan.swap, 0
        if plan.device_excess_bytes == 0:  # otherwise the user has been warned already
            self.start_meter(self._engine, gives_way=True)

    def end_batch(self) -> None:
        """A training batch is over."""
        plan, step_bytes = self._planner.plan, 0
        if plan is None or plan.swap is not self._measured:  # a larger batch was profiled in the meantime
            self._stop()
        elif self._meter is not None:
            always = plan.costs.fixed_device_bytes + plan.swap.buffer_bytes
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
