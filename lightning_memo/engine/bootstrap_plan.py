"""The plan of a profiled step: every layer is recomputed, with memory for just that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from lightning_memo.artifacts.storage_plan import NO_NEEDS, CallPlan, StoragePlan, StoredRange
from lightning_memo.artifacts.swap_plan import HostBacked, StreamedBytes, SwapPlan
from lightning_memo.artifacts.tensor_kind_costs import ATTENTION, INPUT
from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.engine.modules.layer_classes import LayerClasses
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.modules.requested_settings import RequestedSettings
from lightning_memo.planner.host_backed_sizes import host_backed_sizes
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, slot_bytes


class ProfiledLayers(Protocol):
    """The part of the engine that is known before a profiled step.

    Attributes:
        layers: The model's layers, in order.
        settings: The settings that were requested.
        layer_classes: The traits of the layers that have been probed.
        attention: Selects attention kernels.
        parked: Arguments of the first slice that wait on the host.
    """

    layers: list[nn.Module]
    settings: RequestedSettings
    layer_classes: LayerClasses
    attention: AttentionSelector
    parked: list[SavedBytes]


def host_backed_bytes(
    engine: ProfiledLayers,
    calls: Sequence[tuple[Sequence[SavedBytes], int]],
    slices: Sequence[TokenRange],
    host_backed: HostBacked,
) -> StreamedBytes:
    """Return the memory of a plan by which every slice has a slot of its own; see :func:`host_backed_sizes`."""
    gradient_bytes = max(-(-traits.key_value_gradient_bytes // traits.tokens) for traits in engine.layer_classes)
    return host_backed_sizes(
        calls, slices, host_backed, gradient_bytes=gradient_bytes, block_tokens=engine.attention.block_tokens,
        schedule=engine.layer_classes.schedule, shared=engine.parked,
    )  # fmt: skip


def bootstrap_plan(
    engine: ProfiledLayers,
    traits: LayerTraits,
    input_bytes: int,
    slices: Sequence[TokenRange],
    host_backed: HostBacked,
    most_host_bytes: float,
) -> SwapPlan:
    """Return a plan of full recomputation, as far as the memory of a layer is known before it has run.

    Args:
        engine: Runs the layers.
        traits: Traits of the first layer.
        input_bytes: Bytes of the layer's input for the tokens that were probed.
        slices: The slices to be run.
        host_backed: What lives on the host.
        most_host_bytes: Host memory that the step may use. If layers may run by kinds of tensors, attention outputs
            that find no room there are not stored, but computed again.
    """
    saved = (SavedBytes("input", input_bytes), *traits.saved)
    plan = SwapPlan(
        mode="memo", alpha=0.0, schedule="layer", calls=len(engine.layers),
        slice_tokens=engine.settings.profiled_slice_tokens(traits),
        slot_bytes=slot_bytes(saved, traits.tokens, slices, "layer"), precision=engine.settings.swap_precision,
    )  # fmt: skip
    if host_backed == "none":
        by_kind = engine.settings.storage != "alpha" and not (traits.why_whole or traits.why_nest)
        return _without_attention(plan, saved, traits.tokens, slices, most_host_bytes) if by_kind else plan
    sizes = host_backed_bytes(engine, [(saved, traits.tokens)] * len(engine.layers), slices, host_backed)
    return replace(
        plan, schedule=engine.layer_classes.schedule,
        host_backed=host_backed, slot_bytes=sizes.slot, streamed_host_bytes=sizes.host,
        gradient_host_bytes=sizes.gradients, state_host_bytes=sizes.states, staging_bytes=sizes.staging,
    )  # fmt: skip


def _without_attention(
    plan: SwapPlan,
    saved: Sequence[SavedBytes],
    probed_tokens: int,
    slices: Sequence[TokenRange],
    most_host_bytes: float,
) -> SwapPlan:
    """Let as many layer calls as necessary, but the two that never leave the device, not store their attention."""
    inputs = slot_bytes([item for item in saved if item.kind == "input"], probed_tokens, slices, "layer")
    leaving, attention = plan.swapped_calls, plan.slot_bytes - inputs
    if plan.host_bytes <= most_host_bytes or not attention:
        return plan
    storing = max(int(most_host_bytes) - leaving * inputs, 0) // attention
    tokens = slices[-1].stop
    ranges = tuple(StoredRange(kind=kind, place="swap", start=0, stop=tokens) for kind in (INPUT, ATTENTION))
    storage = StoragePlan(
        tokens=tokens, call_classes=tuple(int(storing <= call < leaving) for call in range(plan.calls)),
        calls=(CallPlan(ranges=ranges), CallPlan(ranges=ranges[:1])), needs=NO_NEEDS, bound_seconds=0.0,
        alpha_seconds=None, prices=(),
    )  # fmt: skip
    return replace(plan, storage=storage, stored_host_bytes=leaving * inputs + storing * attention)
