"""Table of how planned memory was used."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_memo.reports.comparison_table import ratio_text
from lightning_memo.utils.units import format_bytes


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
        "arena", format_bytes(use.arena_bytes) + ratio_text(use.arena_bytes, use.lower_bound_bytes, " lower bound")
    )
    table.add_row("peak in use", format_bytes(use.peak_live_bytes))
    if use.reorganisations is not None:
        table.add_row("reorganisations", f"{use.reorganisations:,}")
    return table
