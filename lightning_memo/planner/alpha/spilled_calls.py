"""How many layer calls go to the disk, and whether it keeps up: MEMO's constraints (section 4.2), one tier further."""

from __future__ import annotations

from lightning_memo.artifacts.plan import Budget, LayerCosts
from lightning_memo.artifacts.spill_sizes import SpillSizes


def calls_to_spill(swapped_calls: int, slot_bytes: int, budget: Budget) -> int | None:
    """The fewest layer calls that have to go to the disk for the others to fit the host.

    Args:
        swapped_calls: layer calls that leave the device.
        slot_bytes: what each of them takes.
        budget: host bytes hold the other calls and the buffers through which those of the disk pass.

    Returns:
        Their number; None: host and disk together have no room.
    """
    if swapped_calls * slot_bytes <= budget.host_bytes:
        return 0
    sizes = SpillSizes(slot_bytes)
    room_bytes = budget.host_bytes - sizes.bounce_bytes
    if room_bytes < 0:
        return None
    spilled = max(swapped_calls - room_bytes // slot_bytes, 1)
    return spilled if spilled * sizes.region_bytes <= budget.spill_bytes else None


def disk_seconds(costs: LayerCosts, slot_bytes: int) -> tuple[float, float]:
    """How long the disk takes to write and to read what one layer call swaps."""
    region_bytes = SpillSizes(slot_bytes).region_bytes
    return region_bytes / costs.spill_write_bytes_per_second, region_bytes / costs.spill_read_bytes_per_second


def disk_keeps_up(costs: LayerCosts, slot_bytes: int, spilled_calls: int, alpha: float) -> bool:
    """Whether no layer call waits for the disk.

    Writing has until the next spilled call leaves: buffers on the host take all of one. Reading begins when the
    backward two calls later has left its buffer to it, and has the backward in between.

    Args:
        costs: as measured.
        slot_bytes: what a layer call swaps.
        spilled_calls: how many of them, spread evenly, go to the disk.
        alpha: fraction of the tokens that is swapped, not recomputed.
    """
    if not spilled_calls:
        return True
    swapped_calls = costs.calls - 2
    write_seconds, read_seconds = disk_seconds(costs, slot_bytes)
    forward = min(costs.forward_seconds[:swapped_calls]) * (swapped_calls // spilled_calls)
    backward = min(
        costs.backward_seconds[call] + (1.0 - alpha) * costs.recompute_seconds[call] for call in range(swapped_calls)
    )
    return write_seconds <= forward and read_seconds <= backward
