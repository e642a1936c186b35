"""What to do where memory is short, and tables that compare runs and show the use of planned memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_memo.artifacts.plan import Plan
from lightning_memo.utils.units import format_bytes, format_seconds


def plan_shortage(plan: Plan, can_have_more: bool) -> str:
    """Describe the device memory that a plan lacks, and how to reduce it.

    Args:
        plan: Any plan.
        can_have_more: Whether a larger `device_memory` may help.

    Returns:
        One line; empty if the plan fits.
    """
    if not plan.device_excess_bytes:
        return ""
    ways = ["shorten the sequence"]
    if plan.swap.alpha > 0:
        ways.append('set a smaller alpha or "auto"')
    transients = plan.working_set_bytes - plan.swap.memory.buffer_bytes - plan.swap.memory.kept
    if transients == plan.costs.transient_device_bytes:  # the peak is outside the layers
        ways.append("lower loss_chunk_tokens")
    elif plan.swap.storage.slice_tokens is None:
        ways.append("set slice_tokens")
    if can_have_more:
        ways.append("raise device_memory")
    return (
        f"this plan needs {format_bytes(plan.device_bytes)} of device memory, {format_bytes(plan.device_excess_bytes)} "
        f"more than the budget of {format_bytes(plan.budget.device_bytes)}: {', '.join(ways[:-1])} or {ways[-1]}"
    )


def step_shortage(plan: Plan, taken_bytes: int) -> str:
    """Describe the device memory by which a step exceeded the budget, and how to reduce it.

    Args:
        plan: Plan of the step.
        taken_bytes: Peak of the step, model state included.

    Returns:
        One line; empty if the step stayed within the budget.
    """
    excess = taken_bytes - plan.budget.device_bytes
    if excess <= 0:
        return ""
    return (
        f"a step takes {format_bytes(taken_bytes)} of device memory, {format_bytes(excess)} more than the budget of "
        f"{format_bytes(plan.budget.device_bytes)}, although its plan expects {format_bytes(plan.device_bytes)}: lower "
        "device_memory by the excess, so that plans leave room for it, or shorten the sequence"
    )


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
