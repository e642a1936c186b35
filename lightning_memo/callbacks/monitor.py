"""Logs the throughput, the utilisation and the memory of training, and shows them in the progress bar."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final, cast

import lightning.pytorch as pl
import rich
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import ProcessingSpeedColumn
from rich.progress import BarColumn, ProgressColumn
from torch import nn
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.callbacks.lightning_run import log_metrics, logs_now
from lightning_memo.engine.timeline_recorder import TimelineRecorder
from lightning_memo.shapes.hf_config import shape_of
from lightning_memo.shapes.model_shape import ModelShape
from lightning_memo.utils.find_layers import find_hugging_face
from lightning_memo.utils.units import format_bytes


class Monitor(Callback):
    """Logs throughput, utilisation and memory every `log_every_n_steps` optimizer steps.

    Throughput and waiting times are means over the steps since the last logging.

    | name | meaning |
    | --- | --- |
    | `throughput/tokens_per_second` | tokens of all processes, padding included; needs batches with `input_ids` |
    | `throughput/step_seconds` | time of an optimizer step with data loading, without validation and checkpoints |
    | `throughput/mfu`, `throughput/hfu` | model and hardware FLOPs utilisation in percent (`hfu` with recomputation) |
    | `memo/alpha`, `memo/swapped_bytes`, `memo/recomputed_bytes` | of the plan, for a step; none in plain training |
    | `memo/stall_seconds` | time for which the computation of a step waited for copies, in this process |
    | `device/peak_bytes`, `device/reserved_bytes` | peak of the GPU memory so far, model state included, as \
PyTorch's allocator counts it; not on a CPU |
    | `host/peak_bytes` | peak memory of this process so far, swapped activations included |

    Args:
        peak_flops: FLOP/s of one device in the run's precision. `None` takes the value from Lightning's table; for a
            device that the table does not list, no utilisation is logged.

    Raises:
        ValueError: `peak_flops` is not above 0.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops={peak_flops!r}: give FLOP/s of a device, above 0, or None to look it up")
        self._peak_flops = peak_flops
        self._shape: ModelShape | None = None
        self._trained = 1.0
        self._window = _Window()
        self._recorder: TimelineRecorder | None = None
        self._step = 0
        self._paused = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._shape, self._trained = shape_of_module(pl_module), _trained_share(pl_module)
        if self._peak_flops is None:
            self._peak_flops = peak_flops_of(pl_module.device, str(trainer.precision))
        engine = getattr(trainer.strategy, "engine", None)
        self._recorder = None if engine is None else engine.recorder
        if self._recorder is not None:
            self._recorder.count_waits()
        self._step = trainer.global_step
        self._window = _Window()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rows, tokens = _size_of(batch)
        strategy = trainer.strategy
        # The batch holds only this process's part of the tokens.
        rows *= getattr(strategy, "data_parallel_size", trainer.world_size)
        tokens *= getattr(getattr(strategy, "config", None), "context_parallel_size", 1)
        self._window.tokens += rows * tokens
        if self._shape is not None and tokens:
            again = _recomputed_share(getattr(strategy, "plan", None))
            self._window.model_flops += rows * self._shape.model_flops(tokens, self._trained)
            self._window.recomputed_flops += rows * again * self._shape.recomputed_flops(tokens)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # gradients accumulate
            return
        self._step = trainer.global_step
        self._window.steps += 1
        if self._recorder is not None:
            self._window.stalled += self._recorder.waited_seconds()
        if logs_now(trainer):
            metrics = self._metrics(trainer, pl_module.device)
            log_metrics(trainer, metrics)
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
            self._window = _Window()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window.started += time.perf_counter() - self._paused

    def _metrics(self, trainer: pl.Trainer, device: torch.device) -> dict[str, float]:
        window, seconds = self._window, time.perf_counter() - self._window.started
        metrics = {"throughput/step_seconds": seconds / window.steps}
        if self._recorder is not None:
            metrics["memo/stall_seconds"] = window.stalled / window.steps
        if window.tokens:
            metrics["throughput/tokens_per_second"] = window.tokens / seconds
        if window.model_flops and self._peak_flops is not None:
            peak = self._peak_flops * trainer.world_size * seconds
            metrics["throughput/mfu"] = 100 * window.model_flops / peak
            metrics["throughput/hfu"] = 100 * (window.model_flops + window.recomputed_flops) / peak
        return metrics | plan_metrics(getattr(trainer.strategy, "plan", None)) | memory_peaks(device)


class _Window:
    """What was done since `started`, a time of `time.perf_counter`."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.steps = self.tokens = 0
        self.model_flops = self.recomputed_flops = self.stalled = 0.0


def shape_of_module(module: nn.Module) -> ModelShape | None:
    """The shape of the Hugging Face model in a module; `None` if there is not exactly one, or its family is unknown."""
    models = list(find_hugging_face(module))
    if len(models) != 1:
        return None
    try:
        return shape_of(cast(Any, models[0]).config.to_dict(), "model")
    except ValueError:
        return None


def peak_flops_of(device: torch.device, precision: str) -> float | None:
    """FLOP/s of a device without sparsity, from Lightning's table; `None` if the table does not list the device."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the device is not listed
        peak = get_available_flops(device, torch.bfloat16 if precision.startswith("bf16") else torch.float32)
    return None if peak is None else float(peak)


def plan_metrics(plan: Plan | None) -> dict[str, float]:
    """Alpha, and the bytes that a step swaps and recomputes; empty without a plan and in plain training."""
    if plan is None or plan.swap.plain:
        return {}
    swap, costs = plan.swap, plan.costs
    again = sum(round(swap.recomputed * size) for size in costs.other_bytes)
    return {
        "memo/alpha": swap.alpha,
        "memo/swapped_bytes": float(swap.host_bytes + swap.disk_bytes),
        "memo/recomputed_bytes": float(again),
    }


def memory_peaks(device: torch.device) -> dict[str, float]:
    """Peak memory of the process and of the GPU so far, in bytes."""
    peaks = {"host/peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}
    if device.type == "cuda":
        peaks["device/peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
        peaks["device/reserved_bytes"] = float(torch.cuda.max_memory_reserved(device))
    return peaks


def _recomputed_share(plan: Plan | None) -> float:
    return 0.0 if plan is None else plan.swap.recomputed


def _size_of(batch: Any) -> tuple[int, int]:
    """Number of rows, and of tokens in each row; zeros for batches without `input_ids`."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return (ids.shape[0], ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else (0, 0)


def _trained_share(module: nn.Module) -> float:
    weights = list(module.parameters())
    return sum(w.numel() for w in weights if w.requires_grad) / max(sum(w.numel() for w in weights), 1)


_BAR_COLUMNS: Final = 12
_NARROW_COLUMNS: Final = 100  # in narrower terminals, the metrics take the place of the bar
_LINE_SECONDS: Final = 30.0


class StepProgressBar(RichProgressBar):
    """Shows the progress in steps if `max_steps` is set, tokens per second, alpha and the peak memory.

    The last values that `Monitor` logged are shown next to the module's own metrics. In a narrow terminal the bar is
    left out. If the output is a file or a pipe, a line is printed every half a minute instead. The peak memory is that
    of the GPU (`device peak`), or of the process if it trains on a CPU (`host peak`). Takes the arguments of
    Lightning's `RichProgressBar`.
    """

    _printed_at = 0.0  # time of the last line

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._printed_at = time.monotonic()

    @override
    def configure_columns(self, trainer: pl.Trainer) -> list[ProgressColumn]:
        columns = [c for c in super().configure_columns(trainer) if not isinstance(c, ProcessingSpeedColumn)]
        if rich.get_console().width < _NARROW_COLUMNS:
            return [column for column in columns if not isinstance(column, BarColumn)]
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = _BAR_COLUMNS
        return columns

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._count_steps(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        self._count_steps(trainer)
        if time.monotonic() - self._printed_at >= _LINE_SECONDS:
            self._printed_at = time.monotonic()
            self._print_line(trainer, pl_module)

    def _count_steps(self, trainer: pl.Trainer) -> None:
        if trainer.max_steps > 0 and self.progress is not None and self.train_progress_bar_id is not None:
            task = self.train_progress_bar_id
            self.progress.update(task, description="Step", completed=trainer.global_step, total=trainer.max_steps)

    def _print_line(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        console = self._console
        if not self.is_enabled or console is None or console.is_terminal or console.is_jupyter:
            return
        of = f" of {trainer.max_steps}" if trainer.max_steps > 0 else ""
        metrics = ", ".join(f"{name} {_short(value)}" for name, value in self.get_metrics(trainer, pl_module).items())
        console.print(f"step {trainer.global_step}{of}: {metrics}", highlight=False, soft_wrap=True)

    @override
    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        known = trainer.callback_metrics
        if "throughput/tokens_per_second" in known:
            shown["tokens/s"] = f"{float(known['throughput/tokens_per_second']):,.0f}"
        if "memo/alpha" in known:
            shown["alpha"] = f"{float(known['memo/alpha']):.2f}"
        place = "device" if "device/peak_bytes" in known else "host"
        if f"{place}/peak_bytes" in known:
            shown[f"{place} peak"] = format_bytes(int(known[f"{place}/peak_bytes"]))
        return shown


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
