"""Results of a training run that the table and the picture of a sweep show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_memo.cli.run_summary import RunSummary
from lightning_memo.utils.units import format_bytes


@dataclass(frozen=True)
class Column:
    """A result that the table and the picture show."""

    title: str
    value: Callable[[RunSummary], float | None]
    text: Callable[[float], str]
    axis: str | None = None
    """Title in the picture, if it differs from the table's."""
    axis_unit: float = 1
    from_zero: bool = True
    """Whether the axis in the picture starts at zero."""


COLUMNS = (
    Column("step (s)", lambda run: run.step_seconds, "{:.3f}".format, "step time (s)"),
    Column("tokens/s", lambda run: run.tokens_per_second, "{:,.0f}".format, "tokens per second"),
    Column("step memory", lambda run: run.step_memory_bytes, format_bytes, "step memory on the device (MiB)", 2**20),
    Column("host", lambda run: run.host_bytes, format_bytes, "swapped to the host (MiB)", 2**20),
    Column("alpha", lambda run: run.alpha, "{:.2f}".format),
    Column("train loss", lambda run: run.train_loss, "{:.3f}".format, "train loss (nats)", from_zero=False),
    Column("val loss", lambda run: run.val_loss, "{:.3f}".format, "validation loss (nats)", from_zero=False),
)
