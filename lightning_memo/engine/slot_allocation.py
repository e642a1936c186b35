"""Allocates the memory of a swap plan, and checks that the plan can run here."""

from __future__ import annotations

import math

import torch

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine.copies.timeline_recorder import TimelineRecorder
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.memory.spill import Spill
from lightning_memo.engine.modules.requested_settings import RequestedSettings
from lightning_memo.planner.storage.storage_plan_slices import why_not_stored
from lightning_memo.utils.units import format_bytes


def allocate_slots(
    swap: SwapPlan,
    device: torch.device,
    settings: RequestedSettings,
    recorder: TimelineRecorder,
    most_host_bytes: float = math.inf,
) -> SlotMemory:
    """Allocate the rounding buffers, the host memory and the spill file of a plan.

    Args:
        swap: The plan.
        device: Where layers run.
        settings: The settings that were requested.
        recorder: Records copies.
        most_host_bytes: Upper limit of host memory. Memory of the device stands in for the rest.

    Raises:
        SpillError: The disk does not have the space for what the plan spills.
    """
    spill = None
    if settings.spill_path is not None and swap.spill_bytes:
        spill = Spill(settings.spill_path, swap.spill_bytes, swap.spill_layout, device, settings.test_mode, recorder)
    host_bytes = swap.host_bytes
    if most_host_bytes < host_bytes:
        others = swap.gradient_host_bytes + swap.state_host_bytes + swap.spill_layout.bounce_bytes
        # Where kinds are stored, and attention outputs found no room, layer inputs are all that is.
        size = swap.slot_bytes if swap.storage is None else swap.stored_host_bytes // max(swap.swapped_calls, 1)
        host_bytes = others + max(int(most_host_bytes) - others, 0) // max(size, 1) * size
    return SlotMemory(
        swap.slot_bytes, host_bytes, device, settings.test_mode,
        whole_slots=not swap.streamed and swap.storage is None, gradient_bytes=swap.gradient_host_bytes,
        state_bytes=swap.state_host_bytes, spill=spill, recorder=recorder, check_restored=settings.check_restored,
        device_bytes=swap.host_bytes - host_bytes,
    )  # fmt: skip


def open_reader(memory: SlotMemory, swap: SwapPlan) -> BlockReader:
    """Allocate the buffers through which blocks of keys and values come back from the host."""
    # One block is computed with while another arrives; gradients are also on their way back.
    return memory.reader(3 if swap.host_backed == "all" else 2, swap.staging_bytes)


def why_made_for_others(swap: SwapPlan, settings: RequestedSettings, sliced_outside: bool | None) -> str:
    """Return why layers cannot run by a plan that was made for other settings; empty if they can.

    Args:
        swap: The plan.
        settings: The settings that were requested.
        sliced_outside: Whether context-parallel processes share each slice; `None` if there is one such process.
    """
    if "slice" in (swap.schedule, settings.schedule) and swap.schedule != settings.schedule:
        return f'it was made for schedule="{swap.schedule}"'
    made_for = "alpha" if swap.storage is None else "kinds"
    if swap.mode == "memo" and settings.storage not in ("auto", made_for):
        return f'it was made for storage="{made_for}"'
    if swap.mode == "memo" and swap.precision != settings.swap_precision:
        return f'it was made for swap_precision="{swap.precision}"'
    nested = "nest" in (swap.schedule, settings.schedule)
    if swap.storage is not None and (why := why_not_stored(swap.storage, nested)):
        return why
    if sliced_outside is not None and swap.streamed != sliced_outside:
        return f'it was made for host_backed="{swap.host_backed}"'
    if swap.spill_bytes and settings.spill_path is None:
        return f"it spills {format_bytes(swap.spill_bytes)} to a disk, and no spill_path is given"
    return ""
