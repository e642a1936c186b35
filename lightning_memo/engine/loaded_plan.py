"""A plan as the engine runs by it: whether it can run here, its memory, the slices of a call, the batches it covers."""

from __future__ import annotations

import math

from lightning_memo.artifacts.costs import INPUT, Place
from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine.layers.token_sharing import SequenceCutter
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.disk import DiskStore
from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.engine.memory.places import Store
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.modules.layer_classes import RequestedSettings
from lightning_memo.engine.timeline_recorder import TimelineRecorder
from lightning_memo.planner.token_slices import RECOMPUTED, TokenRange, why_not_stored
from lightning_memo.utils.units import format_bytes


def allocate_slots(
    swap: SwapPlan,
    pages: HostPages,
    settings: RequestedSettings,
    recorder: TimelineRecorder,
    most_host_bytes: float = math.inf,
    ahead_bytes: int = 0,
) -> SlotMemory:
    """Allocate the rounding buffers of a plan, and its memory in all places.

    Args:
        swap: The plan.
        pages: Host memory.
        settings: The settings that were requested.
        recorder: Records copies.
        most_host_bytes: Upper limit of host memory. Memory of the device stands in for the rest.
        ahead_bytes: Host memory that is locked ahead, for a later plan.

    Raises:
        DiskError: The disk does not have the space for what the plan spills.
    """
    others: dict[Place, Store] = {}
    if settings.disk_path is not None and swap.disk_bytes:
        layout = swap.disk_layout
        others["disk"] = DiskStore(
            settings.disk_path, swap.disk_bytes, layout, pages.device, settings.test_mode, recorder
        )
    memory, host_bytes = swap.memory, swap.host_bytes
    if most_host_bytes < host_bytes:
        fixed = memory.gradients + memory.states + swap.disk_layout.bounce_bytes
        size = max((memory.host - memory.gradients - memory.states) // max(swap.swapped_calls, 1), 1)
        host_bytes = fixed + max(int(most_host_bytes) - fixed, 0) // size * size
    return SlotMemory(
        memory.slot, host_bytes, pages, settings.test_mode, gradient_bytes=memory.gradients, state_bytes=memory.states,
        recorder=recorder, device_bytes=swap.host_bytes - host_bytes, others=others, ahead_bytes=ahead_bytes,
    )  # fmt: skip


def open_reader(memory: SlotMemory, swap: SwapPlan) -> BlockReader:
    """Allocate the buffers through which blocks of keys and values come back from the host."""
    # One block is computed with while another arrives; gradients are also on their way back.
    return memory.reader(3 if swap.gradients_on_host else 2, swap.memory.staging)


def why_made_for_others(swap: SwapPlan, settings: RequestedSettings, shares_slices: bool | None) -> str:
    """Return why layers cannot run by a plan that was made for other settings; empty if they can.

    Args:
        swap: The plan.
        settings: The settings that were requested.
        shares_slices: Whether context-parallel processes share each slice; `None` if there is one such process.
    """
    whole = swap.storage.tokens > (settings.slice_tokens or 0) and settings.stream_from_host == "model"
    if (whole or swap.stream_from_host == "model") and swap.stream_from_host != settings.stream_from_host:
        return f'it was made for stream_from_host="{swap.stream_from_host}"'
    if not (settings.by_kind or swap.plain or swap.storage.has_one_alpha):
        return "it names a place for each kind of tensor, and these settings take a single alpha"
    if why := why_not_stored(swap.storage, swap.joint_attention or settings.joint_attention):
        return why
    if shares_slices is not None and swap.streamed != shares_slices:
        return f'it was made for stream_from_host="{swap.stream_from_host}"'
    if swap.disk_bytes and settings.disk_path is None:
        return f"it spills {format_bytes(swap.disk_bytes)} to a disk, and no disk_path is given"
    return ""


def runs_whole(swap: SwapPlan, unsliceable: str, needs_full_attention: str) -> bool:
    """Return whether a layer runs as one slice although a plan may cut its input.

    Args:
        swap: The plan.
        unsliceable: Why the layer has to run as one slice; empty if it can be cut.
        needs_full_attention: Why its attention cannot run slice after slice; empty if it can.
    """
    return bool(unsliceable) or (
        bool(needs_full_attention) and not swap.storage.stores_attention and not swap.joint_attention
    )


def planned_slices(
    swap: SwapPlan, cutter: SequenceCutter, key: int, tokens: int, whole: bool
) -> tuple[TokenRange, ...]:
    """Return the slices of a layer call.

    Args:
        swap: The plan.
        cutter: Cuts sequences into the slices of a plan.
        key: Number of the call among those that are alive.
        tokens: Number of tokens in its input.
        whole: Whether the call runs as one slice, which is recomputed unless all slices have the same places.
    """
    slices = cutter.slices(swap.storage, tokens, key)
    if not whole or len(slices) == 1:
        return slices
    places = slices[0].places if len({part.places for part in slices}) == 1 else RECOMPUTED
    one = TokenRange(0, tokens, places)
    return (one.spilled if slices[0].place(INPUT) == "disk" else one,)


class PlanLimits:
    """Decides whether a plan covers a batch, or the batch has to be profiled.

    Args:
        settings: The settings that were requested.

    Attributes:
        largest: Largest number of tokens of a layer call so far, all sequences together.
    """

    def __init__(self, settings: RequestedSettings) -> None:
        self._settings = settings
        self._tokens = self.largest = 0
        self._calls: int | None = None
        self._exceeded = self._profiled_short = False

    def plan(self, tokens: int, calls: int) -> None:
        """A plan is loaded.

        Args:
            tokens: Number of tokens of the batch that the plan was made for, all sequences together.
            calls: Number of layer calls that the plan was made for.
        """
        self._tokens, self._calls, self._exceeded = tokens, calls, False

    def profile(self, tokens: int, short: bool) -> None:
        """A profiled step begins.

        Args:
            tokens: Number of tokens of its batch, all sequences together.
            short: Whether the batch needs no slices, and later batches may.
        """
        self._tokens, self._calls, self._exceeded = tokens, None, False
        self._profiled_short = short

    def begin_call(self, number: int, tokens: int = 0, parts: int = 1) -> None:
        """A layer call begins.

        Args:
            number: Number of layer calls that are alive already.
            tokens: Number of tokens of the call, all sequences together, if it may have more than the first call.
            parts: Number of calls into which each call of the plan is divided.
        """
        self.largest = max(self.largest, tokens)
        if self._calls is not None and (number >= self._calls * parts or tokens > self._tokens):
            self._exceeded = True  # more calls or tokens before a backward than were planned: these stay on the device

    def exceed(self) -> None:
        """The plan covers no more batches: the next one is profiled."""
        self._exceeded = True

    def covers(self, batch: int, tokens: int) -> bool:
        """Return whether the plan covers `batch` sequences of `tokens` tokens."""
        # What a batch without slices saves does not show what batches with slices save.
        sliced_now = self._profiled_short and tokens > (self._settings.slice_tokens or tokens)
        return not self._exceeded and not sliced_now and batch * tokens <= self._tokens
