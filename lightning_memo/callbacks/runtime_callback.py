"""The callback that MemoStrategy adds: it passes Lightning's hooks on to the runtime."""

from __future__ import annotations

from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_memo.runtime.training_runtime import TrainingRuntime

_CHECKPOINT_KEY: Final = "lightning_memo_plan"


class RuntimeCallback(Callback):
    """Drives the runtime by the hooks of Lightning's training loop, and keeps the plan in checkpoints.

    It is the first callback of the trainer, so that what other callbacks do after a step lies outside of the step.

    Args:
        runtime: The runtime of the fit.
        keeps_plan: Whether checkpoints contain the plan. Stages of a pipeline have different ones.
    """

    def __init__(self, runtime: TrainingRuntime, keeps_plan: bool = True) -> None:
        self._runtime, self._keeps_plan = runtime, keeps_plan
        self._resumed_plan: str | None = None

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A resumed run computes the same numbers only with the same plan: another alpha rounds differently.
        if self._keeps_plan and self._runtime.plan is not None:
            checkpoint[_CHECKPOINT_KEY] = self._runtime.plan.to_json()

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumed_plan = checkpoint.get(_CHECKPOINT_KEY) if self._keeps_plan else None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runtime.start(self._resumed_plan)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._runtime.begin_batch()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self._runtime.before_backward(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runtime.after_backward()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._runtime.end_batch()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runtime.end_training(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._runtime.fail()
