"""The callbacks that strategies add: one drives the runtime, and one ends all processes together after SIGTERM."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_memo.parallel.end_together import SIGTERM_STATUS, EndTogether
from lightning_memo.runtime.training_runtime import TrainingRuntime

PLAN_KEY: Final = "lightning_memo_plan"
"""Entry of a checkpoint with the plan of the run, as JSON."""

log = logging.getLogger(__name__)


class RuntimeCallback(Callback):
    """Drives the runtime by the hooks of Lightning's training loop, and saves the plan in checkpoints.

    It is the first callback of the trainer, so that what other callbacks do after a step lies outside of the step.

    Args:
        runtime: The runtime of the fit.
        resumed_plan: Returns the plan of the checkpoint from which the fit is resumed; `None` if there is none. The
            strategy loads checkpoints, mostly before there is this callback.
        keeps_plan: Whether checkpoints contain the plan. Stages of a pipeline have different ones.
    """

    def __init__(self, runtime: TrainingRuntime, resumed_plan: Callable[[], str | None], keeps_plan: bool) -> None:
        self._runtime, self._resumed_plan, self._keeps_plan = runtime, resumed_plan, keeps_plan

    @override
    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        return Callback, ()  # in a copy of the trainer, this callback has nothing to drive

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A resumed run computes the same numbers only with the same plan: another alpha rounds differently.
        plan = self._resumed_plan() if self._runtime.plan is None else self._runtime.plan.to_json()
        if self._keeps_plan and plan is not None:
            checkpoint[PLAN_KEY] = plan

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runtime.start(self._resumed_plan() if self._keeps_plan else None)

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


class EndOnSigterm(Callback):
    """Ends Lightning's loops after the same batch in all processes when one of them receives SIGTERM.

    It counts batches in the loops of a trainer, from its creation until it is closed. Lightning's own handler of the
    signal takes part in a collective, for which the other processes wait in another one.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        launcher = trainer.strategy.launcher
        self.together = EndTogether(getattr(launcher, "procs", []))
        trainer._signal_connector = _QuietSignals(trainer)
        trainer._signal_connector.register_signal_handlers()
        trainer.callbacks.insert(0, self)

    @override
    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        return Callback, ()  # in a copy of the trainer, this callback has nothing to watch

    def close(self) -> None:
        """Stop watching."""
        self.together.close()
        self._trainer.callbacks[:] = [callback for callback in self._trainer.callbacks if callback is not self]

    def _on_batch_end(self) -> None:
        """Let Lightning end the loop as in one process.

        Raises:
            SIGTERMException: It would not, outside of training.
        """
        if self.together.ends_here():
            self._trainer._signal_connector.received_sigterm = True
            if self._trainer.state.fn != TrainerFn.FITTING:
                raise SIGTERMException(SIGTERM_STATUS)

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._on_batch_end()

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._on_batch_end()

    @override
    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._on_batch_end()

    @override
    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._on_batch_end()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # Another process is gone, or a worker of the data loader got the signal, too. Other callbacks would save a
        # checkpoint now, and wait for processes that are not there.
        if not isinstance(exception, SIGTERMException) and self.together.asked:
            log.error("SIGTERM ends this process before the end of the batch: %s", str(exception).partition("\n")[0])
            self.together.end_now()


class _QuietSignals(_SignalConnector):
    """Lightning's handlers without communication, from the start of a run: models can take minutes to build."""

    @override
    def register_signal_handlers(self) -> None:
        if not self._original_handlers:
            super().register_signal_handlers()

    @override
    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        log.info("received SIGTERM: all processes end after the same batch")
