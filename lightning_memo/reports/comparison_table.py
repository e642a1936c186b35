"""Table that compares settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_memo.utils.units import format_bytes, format_seconds

_CAPTION = (
    "Step memory excludes parameters and optimizer state; budgets include them.\n"
    "Timed one after another: other load on the machine affects the times."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measured values of one row of `comparison_table`."""

    name: str
    step_seconds: float
    step_memory_bytes: int
    host_bytes: int
    tokens_per_second: float


def comparison_table(rows: Sequence[Measurement]) -> Table:
    """Make a table of measurements, with ratios to the first row in parentheses.

    Args:
        rows: The measurements, the baseline first.
    """
    table = Table(title="Comparison", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")  # fits 80 columns
    table.caption = Text(_CAPTION)
    table.add_column("", no_wrap=True)
    for name in ("step", "step memory", "host", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        base = rows[0]
        table.add_row(
            Text(row.name),
            format_seconds(row.step_seconds) + ratio_text(row.step_seconds, base.step_seconds),
            format_bytes(row.step_memory_bytes) + ratio_text(row.step_memory_bytes, base.step_memory_bytes),
            format_bytes(row.host_bytes) + ratio_text(row.host_bytes, base.host_bytes),
            f"{row.tokens_per_second:,.0f}",
        )
    return table


def ratio_text(value: float, base: float, of: str = "") -> str:
    """Ratio of a value to `base` as text to append to the value; empty if `base` is zero."""
    return f" ({value / base:.2f}x{of})" if base else ""
