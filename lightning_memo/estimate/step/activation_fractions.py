"""What happens to the activations of a sequence: which share is swapped, recomputed, and kept on the device."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_memo.estimate.request.training_methods import MethodTraits
from lightning_memo.estimate.step.layers_estimate import LayersEstimate


def activations_sentence(traits: MethodTraits, outcome: LayersEstimate) -> str:
    """Of the activations of a layer, by the tokens that they belong to.

    Args:
        traits: of the method.
        outcome: what it makes of a sequence.
    """
    swapped = (outcome.alpha or 0.0) if traits.recomputes == "alpha" else 0.0
    kept = 1.0 - swapped - outcome.recomputed
    told = (
        f"Of the tokens' activations {_percent(swapped)} are swapped, {_percent(outcome.recomputed)} recomputed, "
        f"{_percent(kept)} kept on the device"
    )
    if outcome.recomputed + swapped == 0:
        return f"{told}."
    if traits.recomputes == "alpha":
        return f"{told}; layer inputs and attention outputs are swapped for all tokens."
    return f"{told}; layer inputs are {'swapped' if traits.streamed else 'kept'} for all tokens."


def format_alpha(alpha: float | None, device_bytes: Mapping[str, int]) -> str:
    """Alpha for a table, three digits; "kept" where it is 0 as all activations stay on the device.

    Args:
        alpha: of an estimate.
        device_bytes: of it, by kind: what swaps has activations in rounding buffers only.
    """
    if alpha is None:
        return "-"
    return "kept" if device_bytes.get("activations") else f"{alpha:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
