"""Tables of the results of runs: a comparison of settings, and the use of planned memory."""

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
            format_seconds(row.step_seconds) + _ratio_text(row.step_seconds, base.step_seconds),
            format_bytes(row.step_memory_bytes) + _ratio_text(row.step_memory_bytes, base.step_memory_bytes),
            format_bytes(row.host_bytes) + _ratio_text(row.host_bytes, base.host_bytes),
            f"{row.tokens_per_second:,.0f}",
        )
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """How the memory requests of planned steps were served."""

    hits: int
    """Number of requests that were served at their planned offsets."""

    fitted: int
    """Number of requests that were served elsewhere in the arena, from free bytes."""

    missed: int
    """Number of requests that PyTorch's allocator served."""

    displaced: dict[str, int]
    """Number of requests that were not served at their planned offsets, by reason."""

    arena_bytes: int
    peak_live_bytes: int
    """Highest number of bytes of the arena in use."""

    lower_bound_bytes: int
    """Lower bound of the peak of any placement of the recorded step."""

    reorganisations: int | None
    """Number of times that PyTorch's allocator freed its cache and retried; None on a CPU, which has no cache."""


def memory_table(use: MemoryUse) -> Table:
    """Make a table of how planned memory was used.

    Args:
        use: Counters at the end of training.
    """
    table = Table(title="Planned memory", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    requests = max(use.hits + use.fitted + use.missed, 1)
    table.add_row(
        "requests in the arena", f"{use.hits + use.fitted:,} of {requests:,} ({1 - use.missed / requests:.2%})"
    )
    table.add_row("  at planned offsets", f"{use.hits:,} ({use.hits / requests:.2%})")
    table.add_row("  in free bytes", f"{use.fitted:,} ({use.fitted / requests:.2%})")
    for reason, count in use.displaced.items():
        if count:
            table.add_row(f"not at planned offsets: {reason}", f"{count:,}")
    table.add_row(
        "arena", format_bytes(use.arena_bytes) + _ratio_text(use.arena_bytes, use.lower_bound_bytes, " lower bound")
    )
    table.add_row("peak in use", format_bytes(use.peak_live_bytes))
    if use.reorganisations is not None:
        table.add_row("reorganisations", f"{use.reorganisations:,}")
    return table


def _ratio_text(value: float, base: float, of: str = "") -> str:
    """Ratio of a value to `base` as text to append to the value; empty if `base` is zero."""
    return f" ({value / base:.2f}x{of})" if base else ""
