"""Describes which fractions of the activations are swapped, recomputed and kept on the device."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_memo.estimate.request.training_methods import MethodTraits
from lightning_memo.estimate.step.layers_estimate import LayersEstimate


def activations_sentence(traits: MethodTraits, outcome: LayersEstimate) -> str:
    """Describe what happens to the activations of a layer, in fractions of the tokens.

    Args:
        traits: Traits of the training method.
        outcome: Estimate of the layers.
    """
    swapped = (outcome.alpha or 0.0) if traits.recomputes == "alpha" else 0.0
    kept = 1.0 - swapped - outcome.recomputed
    fractions = (
        f"{_percent(swapped)} of tokens have their activations swapped, {_percent(outcome.recomputed)} recomputed, "
        f"{_percent(kept)} kept on the device."
    )
    if outcome.recomputed + swapped == 0:
        return fractions
    if traits.recomputes == "alpha":
        return f"{fractions} Layer inputs and attention outputs are swapped for every token."
    return f"{fractions} Layer inputs are {'swapped' if traits.streamed else 'kept on the device'} for every token."


def format_alpha(alpha: float | None, device_bytes: Mapping[str, int]) -> str:
    """Format alpha for a table, with three digits, or "kept" if all activations stay on the device.

    Args:
        alpha: Alpha of an estimate.
        device_bytes: Its device memory by category. With swapping, activations are only in the rounding buffers.
    """
    if alpha is None:
        return "-"
    return "kept" if device_bytes.get("activations") else f"{alpha:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
