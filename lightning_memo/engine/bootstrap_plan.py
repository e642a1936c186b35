"""The plan of a profiled step: every layer is recomputed, with memory for just that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_memo.artifacts.swap_plan import HostBacked, SwapPlan
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, slot_bytes

if TYPE_CHECKING:
    from lightning_memo.engine.engine import Engine


def first_plan(
    engine: Engine, traits: LayerTraits, input_bytes: int, slices: Sequence[TokenRange], host_backed: HostBacked
) -> SwapPlan:
    """Full recomputation, as far as a layer's memory is known before it has run.

    Args:
        engine: Runs the layers.
        traits: Of the first of them.
        input_bytes: Of its input, for the tokens that were looked at.
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
        plan, schedule=engine.kinds.schedule, slice_tokens=engine.wishes.slice_tokens, host_backed=host_backed,
        slot_bytes=sizes.slot, streamed_host_bytes=sizes.host, gradient_host_bytes=sizes.gradients,
        state_host_bytes=sizes.states, staging_bytes=sizes.staging,
    )  # fmt: skip
