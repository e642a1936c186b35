"""Describes which fractions of the activations are swapped, recomputed and kept on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, INPUT
from lightning_memo.estimate.request.estimate_request import Storage
from lightning_memo.estimate.request.training_methods import MethodTraits
from lightning_memo.estimate.step.layers_estimate import LayersEstimate

_KINDS = {INPUT: "layer inputs", ATTENTION: "attention outputs", ALL: "all other tensors"}
_PLACES = {"keep": "kept on the device", "swap": "swapped", "spill": "on the disk", "recompute": "recomputed"}
_LEAST = 0.0005


def activations_sentence(traits: MethodTraits, outcome: LayersEstimate) -> str:
    """Describe what happens to the activations of a layer, in fractions of the tokens.

    Args:
        traits: Traits of the training method.
        outcome: Estimate of the layers.
    """
    if outcome.storage is not None:
        return _by_kind(outcome.storage)
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


def format_alpha(alpha: float | None, device_bytes: Mapping[str, int], storage: Storage | None) -> str:
    """Format alpha for a table, with three digits; "kept" if all activations stay on the device, or "kinds".

    Args:
        alpha: Alpha of an estimate.
        device_bytes: Its device memory by category. With swapping, activations are only in the rounding buffers.
        storage: What becomes of each kind of tensor, if a plan names them.
    """
    if storage is not None:
        return "kinds"
    if alpha is None:
        return "-"
    return "kept" if device_bytes.get("activations") else f"{alpha:.3g}"


def _by_kind(storage: Storage) -> str:
    """Each kind of tensor with the shares of its tokens; equal ones together. Adapters' are too small to matter."""
    alike: dict[str, list[str]] = {}
    for kind, shares in storage.items():
        places = [f"{_percent(share)} {_PLACES[place]}" for place, share in shares.items() if share >= _LEAST]
        name = _KINDS.get(kind, kind.rpartition(".")[2])
        if ".lora_" not in kind and places:
            alike.setdefault(", ".join(places), []).append(name)
    parts = [f"{_listed(names)} {places}" for places, names in alike.items()]
    return f"By kind of tensor, in shares of the tokens: {'; '.join(parts)}."


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
