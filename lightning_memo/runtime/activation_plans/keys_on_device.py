"""Keys and values that were on the host in a profiled step return to the device, if it has room."""

from __future__ import annotations

from typing import Final

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_memo.engine import Engine
from lightning_memo.planner.alpha.step_time import steady
from lightning_memo.planner.token_slices import share, slot_bytes
from lightning_memo.runtime.activation_plans.measured_step import MeasuredStep

_MOST_SHARE: Final = 0.9  # of the device's budget: the step that is estimated has not run


def return_keys(step: MeasuredStep, engine: Engine, alpha: float | str) -> bool:
    """Let the next batch be profiled with keys and values on the device, where slices are faster.

    Args:
        step: The step that was measured.
        engine: The engine that profiled it.
        alpha: The user's alpha, or "auto".

    Returns:
        False if keys and values stay where they are: the user decided it, layers run whole, or the device has no room.
    """
    settings, swap = engine.settings, engine.swap
    chosen = settings.host_backed == "auto" and swap is not None and swap.streamed
    if not chosen or settings.slice_tokens is None or engine.layer_classes.why_whole:
        return False
    if _device_bytes(step, engine, 0.0 if alpha == "auto" else float(alpha)) > _MOST_SHARE * step.budget.device_bytes:
        return False
    engine.cut(settings.slice_tokens, "none")
    rank_zero_info(
        "lightning_memo: the device has room for keys and values, with which slices are faster; the next batch is "
        "profiled again."
    )
    return True


def _device_bytes(step: MeasuredStep, engine: Engine, alpha: float) -> int:
    """Device memory of a step whose layers keep keys and values, their gradients and whole slots there.

    A profile may have measured fewer tokens than a layer call has.
    """
    profile, costs, most = step.profile, steady(step.costs), engine.settings.slice_tokens
    slices, calls = engine.cutter.cut(profile.tokens, alpha, most), profile.saved_by_calls
    slot = max(slot_bytes(saved, tokens, slices, "layer") for saved, tokens in calls)
    keys = max(
        sum(share(item, profile.tokens, tokens) for item in saved if item.kind in ("key", "value"))
        for saved, tokens in calls
    )
    gradients = max(traits.key_value_gradient_bytes / traits.tokens for traits in engine.layer_classes)
    working = costs.working_bytes_at(alpha, most) + keys + int(gradients * profile.tokens)
    return costs.fixed_device_bytes + working + 2 * slot
