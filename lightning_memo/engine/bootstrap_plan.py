"""The plan of a profiled step: every layer is recomputed, with memory for just that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from lightning_memo.artifacts.swap_plan import HostBacked, StreamedBytes, SwapPlan
from lightning_memo.engine.modules.layer_classes import LayerClasses
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.modules.requested_settings import RequestedSettings
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, slot_bytes


class ProfiledLayers(Protocol):
    """The part of the engine that is known before a profiled step.

    Attributes:
        layers: The model's layers, in order.
        settings: The settings that were requested.
        layer_classes: The traits of the layers that have been probed.
    """

    layers: list[nn.Module]
    settings: RequestedSettings
    layer_classes: LayerClasses

    def streamed_bytes(
        self, calls: Sequence[tuple[Sequence[SavedBytes], int]], slices: Sequence[TokenRange], host_backed: HostBacked
    ) -> StreamedBytes:
        """Return the memory of a plan by which every slice has a slot of its own."""


def bootstrap_plan(
    engine: ProfiledLayers, traits: LayerTraits, input_bytes: int, slices: Sequence[TokenRange], host_backed: HostBacked
) -> SwapPlan:
    """Return a plan of full recomputation, as far as the memory of a layer is known before it has run.

    Args:
        engine: Runs the layers.
        traits: Traits of the first layer.
        input_bytes: Bytes of the layer's input for the tokens that were probed.
        slices: The slices to be run.
        host_backed: What lives on the host.
    """
    saved = (SavedBytes("input", input_bytes), *traits.saved)
    plan = SwapPlan(
        mode="memo", alpha=0.0, schedule="layer", slice_tokens=None, calls=len(engine.layers),
        slot_bytes=slot_bytes(saved, traits.tokens, slices, "layer"),
    )  # fmt: skip
    if host_backed == "none":
        return plan
    sizes = engine.streamed_bytes([(saved, traits.tokens)] * len(engine.layers), slices, host_backed)
    return replace(
        plan, schedule=engine.layer_classes.schedule, slice_tokens=engine.settings.slice_tokens,
        host_backed=host_backed, slot_bytes=sizes.slot, streamed_host_bytes=sizes.host,
        gradient_host_bytes=sizes.gradients, state_host_bytes=sizes.states, staging_bytes=sizes.staging,
    )  # fmt: skip
