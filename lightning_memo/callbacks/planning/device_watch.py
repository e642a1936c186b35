"""Compares what a step takes of the device with what the user gave."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.callbacks.planning.plan_after_first_step import PlanAfterFirstStep
from lightning_memo.callbacks.planning.step_meter import MeteringCallback, meter_step
from lightning_memo.engine import Engine
from lightning_memo.reports.shortage import step_shortage


class WatchDevice(MeteringCallback):
    """Measures the first batch of each plan, and tells once where it takes more of the device than the user gave.

    A plan is made from a step in which every layer was recomputed: what others take is an estimate. Where memory is
    planned, the arena takes more than what is alive in it by what its places cost.

    It stands after what plans.

    Args:
        engine: Runs the steps.
        planning: Makes the plans.
    """

    def __init__(self, engine: Engine, planning: PlanAfterFirstStep) -> None:
        self._engine, self._planning = engine, planning
        self._metered: SwapPlan | None = None
        self._taken_bytes = 0  # by the batch that was metered, model state included

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        plan = self._planning.plan
        if plan is None or plan.swap is self._metered or self._engine.profile is not None:
            return
        self._metered, self._taken_bytes = plan.swap, 0
        if plan.device_excess_bytes == 0:  # else it is told already
            self._meter = meter_step(self._engine, gives_way=True)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        plan, taken_bytes = self._planning.plan, 0
        if plan is None or plan.swap is not self._metered:  # a larger batch was profiled meanwhile
            self._stop(trainer)
        elif self._meter is not None:
            always = plan.costs.fixed_device_bytes + plan.swap.buffer_bytes
            taken_bytes = self._taken_bytes = always + self._stop(trainer)
        elif self._taken_bytes and plan.placement is not None:
            taken_bytes = self._taken_bytes + plan.placement.peak_bytes - plan.placement.lower_bound_bytes
            self._taken_bytes = 0
        if plan is not None and (told := step_shortage(plan, taken_bytes)):
            rank_zero_warn(f"MemoStrategy: {told}.")
            self._taken_bytes = 0

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> int:
        """Bytes at the peak beside model state and buffers; 0 if they are not known."""
        meter, self._meter = self._meter, None
        measured = None if meter is None else meter.stop(accumulating=trainer.accumulate_grad_batches > 1)
        return 0 if measured is None else max(measured.layers, measured.outside)
