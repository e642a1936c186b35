"""Lightning's progress bar, which counts steps where they end training, with what the monitor measures."""

from __future__ import annotations

import time
from typing import Any, Final

import lightning.pytorch as pl
import rich
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import ProcessingSpeedColumn
from rich.progress import BarColumn, ProgressColumn
from typing_extensions import override

from lightning_memo.utils.units import format_bytes

_BAR_COLUMNS: Final = 12
_NARROW_COLUMNS: Final = 100  # of a terminal, where the numbers need the room of the bar
_LINE_SECONDS: Final = 30.0


class StepProgressBar(RichProgressBar):
    """Shows the steps of `max_steps`, or epochs where none are given; tokens per second, alpha and the peak of memory.

    These stand beside the module's own metrics, as `Monitor` logged them last. In a narrow terminal the bar gives way;
    where the output is a file or a pipe, there is a line each half a minute instead. The peak is the device's, on a CPU
    the process's. Arguments are those of Lightning's `RichProgressBar`.
    """

    _told = 0.0  # when the last line was printed

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._told = time.monotonic()

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
        if time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
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
        peak = known.get("device/peak_bytes", known.get("host/peak_bytes"))
        if peak is not None:
            shown["peak"] = format_bytes(int(peak))
        return shown


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
