"""The disk as a second tier for swapped activations: how many layer calls spill, and whether the disk keeps up."""

from __future__ import annotations

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.spill_layout import SpillLayout


def calls_to_spill(swapped_calls: int, slot_bytes: int, budget: Budget) -> int | None:
    """Smallest number of layer calls that have to go to the disk for the others to fit the host.

    Args:
        swapped_calls: Number of layer calls whose activations leave the device.
        slot_bytes: Bytes of each of them.
        budget: Its host bytes hold the remaining calls and the bounce buffers of the disk.

    Returns:
        The number of calls; None if host and disk together cannot hold them.
    """
    if swapped_calls * slot_bytes <= budget.host_bytes:
        return 0
    layout = SpillLayout(slot_bytes)
    room_bytes = budget.host_bytes - layout.bounce_bytes
    if room_bytes < 0:
        return None
    spilled = max(swapped_calls - room_bytes // slot_bytes, 1)
    return spilled if spilled * layout.region_bytes <= budget.spill_bytes else None


def disk_seconds(costs: LayerCosts, slot_bytes: int) -> tuple[float, float]:
    """Seconds that the disk takes to write, and to read, the activations of one layer call."""
    region_bytes = SpillLayout(slot_bytes).region_bytes
    return region_bytes / costs.spill_write_bytes_per_second, region_bytes / costs.spill_read_bytes_per_second


def disk_keeps_up(costs: LayerCosts, slot_bytes: int, spilled_calls: int, alpha: float) -> bool:
    """Whether no layer call waits for the disk: MEMO's overlap constraint (section 4.2), applied to the disk.

    A write may last until the next spilled call is offloaded, because host buffers hold one whole call. A read starts
    when the backward two calls later has released its rounding buffer, and may last as long as the backward in between.

    Args:
        costs: Measured costs.
        slot_bytes: Bytes that one layer call swaps.
        spilled_calls: Number of layer calls, evenly spaced, that go to the disk.
        alpha: Fraction of the tokens that is swapped and not recomputed.
    """
    if not spilled_calls:
        return True
    swapped_calls = costs.swapped_calls
    write_seconds, read_seconds = disk_seconds(costs, slot_bytes)
    leaving = range(swapped_calls)
    forward = min(costs.forward_seconds_at(call, alpha) for call in leaving) * (swapped_calls // spilled_calls)
    backward = min(costs.backward_seconds_at(call, alpha) for call in leaving)
    return write_seconds <= forward and read_seconds <= backward
