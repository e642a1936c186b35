"""The counters of the planned allocator, for messages, tables and loggers."""

from __future__ import annotations

import torch

from lightning_memo.allocator import AllocatorStats
from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.reports.tables import MemoryUse
from lightning_memo.utils.units import format_bytes


def placement_summary(placement: StepPlacement) -> str:
    """One line: the number of placed buffers, the size of the arena, and its distance from the lower bound."""
    over = placement.peak_bytes / placement.lower_bound_bytes if placement.lower_bound_bytes else 1.0
    bound = "the minimum possible" if over == 1.0 else f"{over:.4f} x the lower bound"
    room = f", and {format_bytes(placement.room_bytes)} more for larger steps" if placement.room_bytes else ""
    fit = f"{placement.requests:,} buffers fit in {format_bytes(placement.peak_bytes)}"
    return f"memory plan ready: {fit}, {bound}{room}"


def memory_use(stats: AllocatorStats, placement: StepPlacement, device: torch.device) -> MemoryUse:
    """The allocator's counters for the table at the end of training."""
    return MemoryUse(
        hits=stats.hits,
        fitted=stats.fitted,
        missed=stats.misses,
        displaced={
            "the size varies, or is new": stats.miss_size,
            "more, or others before them": stats.miss_end,
            "the memory was not free": stats.miss_overlap,
            "outlived the step": stats.unplanned,
        },
        arena_bytes=stats.arena_bytes,
        peak_live_bytes=stats.peak_live_bytes,
        lower_bound_bytes=placement.lower_bound_bytes,
        reorganisations=_reorganisations(device),
    )


def memory_metrics(stats: AllocatorStats, device: torch.device) -> dict[str, float]:
    """The allocator's counters for loggers."""
    names = (
        "hits",
        "fitted",
        "miss_size",
        "miss_end",
        "miss_overlap",
        "unplanned",
        "missed_bytes",
        "arena_bytes",
        "peak_live_bytes",
    )
    metrics = {f"memory/{name}": float(getattr(stats, name)) for name in names}
    reorganisations = _reorganisations(device)
    return metrics if reorganisations is None else metrics | {"memory/reorganisations": float(reorganisations)}


def _reorganisations(device: torch.device) -> int | None:
    """How often PyTorch's allocator freed its cache to try again (MEMO, section 3.2); `None` on a CPU."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else None
