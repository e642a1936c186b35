"""Lightning's progress bar with steps instead of epochs, and with the metrics of the monitor."""

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
