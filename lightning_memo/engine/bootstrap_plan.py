"""The plan of a profiled step: every layer is recomputed, with memory for just that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from lightning_memo.artifacts.costs import INPUT, resident_calls
from lightning_memo.artifacts.swap_plan import CallPlan, PlanMemory, StoragePlan, StreamFromHost, SwapPlan
from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.engine.layers.token_sharing import SequenceCutter
from lightning_memo.engine.modules.layer_classes import LayerClasses, RequestedSettings
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.planner.streamed_bytes import StreamedBytes, streamed_bytes, with_longest_segments
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, memory_of_plan, plan_of_alpha, slot_bytes
from lightning_memo.utils.free_memory import free_device_bytes


class ProfiledLayers(Protocol):
    """The part of the engine that is known before a profiled step.

    Attributes:
        layers: The model's layers, in order.
        settings: The settings that were requested.
        layer_classes: The traits of the layers that have been probed.
        attention: Selects attention kernels.
        cutter: Cuts sequences into slices.
        parked: Arguments of the first slice that wait on the host.
    """

    layers: list[nn.Module]
    settings: RequestedSettings
    layer_classes: LayerClasses
    attention: AttentionSelector
    cutter: SequenceCutter
    parked: list[SavedBytes]

    def agreed_segments(self, own: int | None) -> int | None:
        """Return the size of the segments in which all processes run layers again."""


def streamed_bytes_of_calls(
    engine: ProfiledLayers,
    calls: Sequence[tuple[Sequence[SavedBytes], int]],
    slices: Sequence[TokenRange],
    stream_from_host: StreamFromHost,
    segments: Sequence[range] = (),
) -> StreamedBytes:
    """Return the memory of a plan by which every slice has a slot of its own; see :func:`streamed_bytes`."""
    gradient_bytes = max(-(-traits.key_value_gradient_bytes // traits.tokens) for traits in engine.layer_classes)
    return streamed_bytes(
        calls, slices, stream_from_host, gradient_bytes=gradient_bytes, block_tokens=engine.attention.block_tokens,
        shared=engine.parked, segments=segments,
    )  # fmt: skip


def may_run_again(stream_from_host: StreamFromHost, in_flight: int | None) -> bool:
    """Return whether layer calls may run again in the backward if the host is too small.

    Args:
        stream_from_host: What lives on the host.
        in_flight: Number of micro-batches whose layer calls are alive at once; `None` without a pipeline.
    """
    return stream_from_host == "hidden" and in_flight is None


def bootstrap_plan(
    engine: ProfiledLayers,
    traits: LayerTraits,
    input_bytes: int,
    slices: Sequence[TokenRange],
    stream_from_host: StreamFromHost,
    most_host_bytes: float,
    in_flight: int | None = None,
) -> SwapPlan:
    """Return a plan of full recomputation, as far as the memory of a layer is known before it has run.

    Args:
        engine: Runs the layers.
        traits: Traits of the first layer.
        input_bytes: Bytes of the layer's input for the tokens that were probed.
        slices: The slices to be run.
        stream_from_host: What lives on the host.
        most_host_bytes: Host memory that the step may use. If layers may run by kinds of tensors, attention outputs
            that find no room there are not stored, but computed again.
        in_flight: Number of micro-batches whose layer calls are alive at once; `None` without a pipeline.
    """
    saved = [SavedBytes("input", input_bytes), *traits.saved]
    calls, multiple = [(saved, traits.tokens)] * len(engine.layers), engine.cutter.multiple
    longest = engine.settings.profiled_slice_tokens(traits)
    storage = plan_of_alpha(slices[-1].stop, 0.0, len(calls), slice_tokens=longest, multiple=multiple)
    swap = SwapPlan(storage=storage, memory=PlanMemory())
    if stream_from_host != "none":

        def memory_of(plan: StoragePlan) -> PlanMemory:
            return streamed_bytes_of_calls(engine, calls, slices, stream_from_host, plan.segments).memory

        def fits(plan: StoragePlan) -> bool:
            return memory_of(plan).host <= most_host_bytes

        if may_run_again(stream_from_host, in_flight):
            longest = storage if fits(storage) else with_longest_segments(storage, fits) or storage
            storage = replace(storage, segment_calls=engine.agreed_segments(longest.segment_calls))
        return SwapPlan(storage=storage, memory=memory_of(storage), stream_from_host=stream_from_host)
    if engine.settings.by_kind and not (traits.unsliceable or traits.needs_full_attention):
        storage = _without_attention(swap, saved, traits.tokens, slices, most_host_bytes)
    return replace(swap, storage=storage, memory=memory_of_plan(storage, calls, swap.swapped_calls, multiple=multiple))


def _without_attention(
    swap: SwapPlan,
    saved: Sequence[SavedBytes],
    probed_tokens: int,
    slices: Sequence[TokenRange],
    most_host_bytes: float,
) -> StoragePlan:
    """Let as many layer calls as necessary, but the two that never leave the device, not store their attention."""
    slot = slot_bytes(saved, probed_tokens, slices)
    inputs = slot_bytes([item for item in saved if item.kind == "input"], probed_tokens, slices)
    leaving, attention, plan = swap.swapped_calls, slot - inputs, swap.storage
    if leaving * slot <= most_host_bytes or not attention:
        return plan
    storing = max(int(most_host_bytes) - leaving * inputs, 0) // attention
    (call,) = plan.calls
    return replace(
        plan,
        call_classes=tuple(int(storing <= number < leaving) for number in range(swap.calls)),
        calls=(call, CallPlan(ranges=tuple(r for r in call.ranges if r.kind == INPUT))),
    )


def bytes_ahead(
    swap: SwapPlan, traits: LayerTraits, device: torch.device, most_host_bytes: float, in_flight: int | None = None
) -> int:
    """Return the host memory that a later plan is going to use for what the device has no room for.

    Args:
        swap: The plan of the profiled step.
        traits: Traits of the first layer.
        device: Where the layers run.
        most_host_bytes: Host memory that plans may use.
        in_flight: Number of micro-batches whose layer calls are alive at once; `None` without a pipeline.
    """
    if device.type != "cuda" or swap.streamed:
        return 0
    calls = swap.calls * (in_flight or 1)
    leaving = calls - resident_calls(calls, in_flight)
    saved_bytes = leaving * traits.saved_bytes * swap.storage.tokens // traits.tokens
    without_room = max(saved_bytes - free_device_bytes(device), 0)
    return int(min(without_room, most_host_bytes))
