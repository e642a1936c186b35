"""A run of Lightning's Trainer: its state as the runtime reads it, its loggers, and the hooks that drive a runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.runtime.training_runtime import TrainingRuntime


class LightningRun:
    """Implements :class:`~lightning_memo.runtime.training_run.TrainingRun` for a `Trainer`.

    Args:
        trainer: The trainer. Values are read when they are asked for, because callbacks may change them.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    @property
    def model(self) -> pl.LightningModule:
        return self._trainer.lightning_module

    @property
    def framework_module(self) -> pl.LightningModule:
        return self.model

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._trainer.optimizers

    @property
    def precision(self) -> str:
        return str(self._trainer.precision)

    @property
    def rank(self) -> int:
        return self._trainer.global_rank

    @property
    def processes(self) -> int:
        return self._trainer.world_size

    @property
    def accumulated_batches(self) -> int:
        return self._trainer.accumulate_grad_batches

    @property
    def gradient_clip(self) -> float | None:
        return self._trainer.gradient_clip_val

    @property
    def automatic_optimization(self) -> bool:
        return self._trainer.lightning_module.automatic_optimization

    @property
    def step(self) -> int:
        return self._trainer.global_step

    @property
    def batch(self) -> int:
        return self._trainer.fit_loop.batch_idx

    @property
    def logs_now(self) -> bool:
        return bool(self._trainer.loggers) and logs_now(self._trainer)

    def folder(self) -> Path | None:
        folder = Path(self._trainer.log_dir or self._trainer.default_root_dir)  # all processes have to ask
        # Without a logger and a `default_root_dir`, Lightning gives the working folder, where nobody expects files.
        return None if folder.resolve() == Path.cwd() else folder

    def note_logged(self) -> Callable[[], None]:
        results = self._trainer._results
        if results is None:
            return lambda: None
        before = {key: dict(vars(metric)) for key, metric in results.items()}  # their sums are replaced, not changed

        def take_back() -> None:
            for key in results.keys() - before.keys():
                del results[key]
            for key, values in before.items():
                vars(results[key]).update(values)

        return take_back

    def log(self, metrics: Mapping[str, float]) -> None:
        log_metrics(self._trainer, metrics)


def logs_now(trainer: pl.Trainer) -> bool:
    """Whether Lightning logs metrics of the batch that has just been trained, if an optimizer stepped after it."""
    return trainer._logger_connector.should_update_logs or bool(trainer.fast_dev_run)


def log_metrics(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Send metrics of the present batch to the loggers, for the step under which Lightning logs those of the module."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def log_pictures(trainer: pl.Trainer, pictures: Mapping[str, Path]) -> None:
    """Log PNG files with the loggers that take images: those of TensorBoard and of Weights & Biases.

    Args:
        trainer: Trainer of the run. Its present step is that of the images. Only its first process logs.
        pictures: The files, by the names of the images.
    """
    for logger in trainer.loggers:
        for name, path in pictures.items():
            if isinstance(logger, TensorBoardLogger):
                from matplotlib.image import imread  # the import takes a second

                logger.experiment.add_image(name, imread(path), trainer.global_step, dataformats="HWC")
            elif isinstance(logger, WandbLogger):
                logger.log_image(name, [str(path)], step=trainer.global_step)


class RuntimeCallback(Callback):
    """Drives the runtime by the hooks of Lightning's training loop.

    It is the first callback of the trainer, so that what other callbacks do after a step lies outside of the step.

    Args:
        runtime: The runtime of the fit.
        resumed_plan: Returns the plan of the checkpoint from which the fit is resumed; `None` if there is none. The
            strategy loads checkpoints, mostly before there is this callback.
    """

    def __init__(self, runtime: TrainingRuntime, resumed_plan: Callable[[], str | None]) -> None:
        self._runtime, self._resumed_plan = runtime, resumed_plan

    @override
    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        return Callback, ()  # in a copy of the trainer, this callback has nothing to drive

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runtime.start(self._resumed_plan())

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
