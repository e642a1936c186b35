"""A table of how the planned memory was used."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_memo.reports.comparison_table import ratio_text
from lightning_memo.utils.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """What became of the requests for memory of the steps that were planned."""

    hits: int
    """Served at their places."""

    misses: dict[str, int]
    """Left to PyTorch's allocator, by reason."""

    arena_bytes: int
    peak_live_bytes: int
    """Most bytes of the arena in use at once."""

    lower_bound_bytes: int
    """No placement of the recorded step has a lower peak."""

    reorganisations: int | None
    """How often PyTorch's allocator had to free its cache and try again; None on a CPU, which has no cache."""


def memory_table(use: MemoryUse) -> Table:
    """Show how the planned memory was used.

    Args:
        use: Counters at the end of training.
    """
    table = Table(title="Planned memory", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    requests = use.hits + sum(use.misses.values())
    table.add_row("requests at their places", f"{use.hits:,} of {requests:,} ({use.hits / max(requests, 1):.2%})")
    for reason, count in use.misses.items():
        if count:
            table.add_row(f"left to PyTorch: {reason}", f"{count:,}")
    table.add_row(
        "arena", format_bytes(use.arena_bytes) + ratio_text(use.arena_bytes, use.lower_bound_bytes, " lower bound")
    )
    table.add_row("most in use at once", format_bytes(use.peak_live_bytes))
    if use.reorganisations is not None:
        table.add_row("reorganisations", f"{use.reorganisations:,}")
    return table
