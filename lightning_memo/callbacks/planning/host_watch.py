"""Looks after the host's memory while training goes on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_memo.callbacks.planning.plan_after_first_step import PlanAfterFirstStep
from lightning_memo.engine import Engine
from lightning_memo.profiler.machine import available_host_bytes
from lightning_memo.utils.units import format_bytes

_CHECK_BATCHES = 10
_RESERVE_BYTES = 2**30


class WatchHost(Callback):
    """Shrinks the plan before the kernel ends the process, where others take the host's memory meanwhile.

    It stands before what plans, so that a batch that is being profiled is left alone.

    Args:
        engine: Holds activations on the host.
        planning: Makes the plans.
    """

    def __init__(self, engine: Engine, planning: PlanAfterFirstStep) -> None:
        self._engine, self._planning = engine, planning

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        profile, held = self._engine.profile, self._engine.host_bytes
        profiled = profile is not None and profile.complete
        if batch_idx % _CHECK_BATCHES or profiled or not held or not self._planning.can_shrink:
            return
        left = available_host_bytes()
        if left < min(_RESERVE_BYTES, held // 16):
            rank_zero_warn(
                f"MemoStrategy: the host has {format_bytes(left)} left, so the {format_bytes(held)} for swapped "
                "activations are given back, and the next batch is planned with less: see what else runs, or set "
                "host_memory."
            )
            self._planning.shrink()
