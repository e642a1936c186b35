"""Time and memory of optimizer steps: of a run, and of plain training and full recomputation to compare it with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo.cli.build_run import quiet
from lightning_memo.models import CausalLM
from lightning_memo.profiler.memory_meter import PeakMeter
from lightning_memo.reports.tables import Measurement

METERED_STEP = 2
"""Index of the step whose memory is measured. Step 0 may be profiled; step 1 allocates buffers and optimizer state."""


class StepStats(Callback):
    """Times the last optimizer steps of a :class:`~lightning_memo.models.CausalLM`, and measures the memory of one.

    A step is all its micro-batches, without data loading, logging, validation or checkpoints. Time and memory are
    measured in different steps, because measuring memory takes time. With several processes, both are those of this
    process, whereas tokens and losses are those of all processes. Losses before a checkpoint count in a resumed run.

    Args:
        last: Number of the last steps whose time and loss are averaged.
        goes_on: Whether the run resumes from a checkpoint of its own, so that earlier times and memory count, too.
    """

    def __init__(self, last: int = 20, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        self.step_memory_bytes: int | None = None  # peak on the device, above what is allocated between steps
        self.tokens_per_step = 0
        self.train_loss: float | None = None  # mean over the last micro-batches; set when training ends
        self._seconds: deque[float] = deque(maxlen=last)
        self._losses: deque[torch.Tensor] = deque(maxlen=last)
        self._steps_done = 0
        self._step_seconds = 0.0
        self._step_tokens = 0
        self._batch_start = 0.0
        self._global_step = 0
        self._meter: PeakMeter | None = None
        self._open = ExitStack()

    @property
    def step_seconds(self) -> float | None:
        """Median time of the last steps; `None` before a step was timed."""
        return median(self._seconds) if self._seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a step divided by its median time."""
        return self.tokens_per_step / self.step_seconds if self.step_seconds else None

    def measurement(self, name: str, step_memory_bytes: int | None, host_bytes: int) -> Measurement | None:
        """A row of the comparison; `None` if the run was too short to be measured."""
        if self.step_seconds is None or self.tokens_per_second is None or step_memory_bytes is None:
            return None
        return Measurement(
            name=name,
            step_seconds=self.step_seconds,
            step_memory_bytes=step_memory_bytes,
            host_bytes=host_bytes,
            tokens_per_second=self.tokens_per_second,
        )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._steps_done == METERED_STEP and self._meter is None:
            # Gradients of the last step would be freed during this one, and hide as many bytes of its peak.
            trainer.optimizers[0].zero_grad()
            self._meter = self._open.enter_context(PeakMeter(pl_module.device))
        _wait(pl_module.device)
        self._batch_start = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _wait(pl_module.device)
        self._step_seconds += time.perf_counter() - self._batch_start
        tokens: Any = pl_module.batch_tokens
        self._step_tokens += tokens
        self._losses.append(trainer.callback_metrics["train_loss"].detach().clone())  # the mean over all processes
        if trainer.global_step > self._global_step:
            self._end_step(trainer.global_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._losses:
            self.train_loss = torch.stack([loss.float().cpu() for loss in self._losses]).mean().item()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": [loss.item() for loss in self._losses],
            "seconds": list(self._seconds),
            "tokens_per_step": self.tokens_per_step,
            "step_memory_bytes": self.step_memory_bytes,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses.extend(torch.tensor(loss) for loss in state_dict["losses"])
        if self.goes_on:  # another run may have been on another machine
            self._seconds.extend(state_dict["seconds"])
            self.tokens_per_step = state_dict["tokens_per_step"]
            self.step_memory_bytes = state_dict["step_memory_bytes"]

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._open.close()

    def _end_step(self, global_step: int) -> None:
        self._open.close()
        if self._steps_done == METERED_STEP and self._meter is not None:
            self.step_memory_bytes = self._meter.peak_bytes
        if self._steps_done > METERED_STEP:
            self._seconds.append(self._step_seconds)
        self.tokens_per_step = self._step_tokens
        self._steps_done += 1
        self._global_step = global_step
        self._step_seconds, self._step_tokens = 0.0, 0


def _wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_baselines(
    module: Mapping[str, Any], batch: dict[str, Tensor], trainer: Mapping[str, Any], steps: int, seed: int
) -> list[Measurement]:
    """Trains new models on one batch, with plain training and with Hugging Face's gradient checkpointing.

    The settings of the trainer and the optimizer and the measuring callback are those of the run, so that the only
    difference is the handling of activations.

    Args:
        module: Arguments of :class:`~lightning_memo.models.causal_lm.CausalLM`.
        batch: ``{"input_ids": [batch, seq_len], "labels": [batch, seq_len]}``.
        trainer: Arguments of :class:`~lightning.pytorch.Trainer` in the run, for example precision and accumulation.
        steps: Number of timed optimizer steps.
        seed: Random seed of the weights.

    Returns:
        One row for each. A model that does not fit in device memory is left out, with a warning.
    """
    rows = []
    for name, checkpointing in (("plain", False), ("full recomputation", True)):
        seed_everything(seed, verbose=False)
        model = CausalLM(**{**module, "model": {**module["model"], "gradient_checkpointing": checkpointing}})
        row = _measure(name, model, batch, trainer, steps)
        if row is not None:
            rows.append(row)
    return rows


def _measure(
    name: str, model: CausalLM, batch: dict[str, Tensor], trainer: Mapping[str, Any], steps: int
) -> Measurement | None:
    stats = StepStats(last=steps)
    accumulate = trainer.get("accumulate_grad_batches", 1)
    max_steps = METERED_STEP + 1 + steps
    own = {
        "strategy": "auto",
        "callbacks": [stats],
        "max_steps": max_steps,
        "max_epochs": -1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    try:
        with quiet():
            rows: Any = [batch] * (max_steps * accumulate)
            batches: DataLoader[Any] = DataLoader(rows, batch_size=None)
            Trainer(**{**trainer, **own}).fit(model, train_dataloaders=batches)
    except torch.OutOfMemoryError:
        rank_zero_warn(f"The comparison leaves out {name!r}, which does not fit in device memory.")
        return None
    return stats.measurement(name, stats.step_memory_bytes, host_bytes=0)
