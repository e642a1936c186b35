"""Context extension: scales rotary positions to sequences longer than a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning.pytorch.utilities import rank_zero_warn
from transformers import PretrainedConfig

_ORIGINAL: Final = "original_max_position_embeddings"
_OPTIONS: Final[dict[str, Mapping[str, Any]]] = {
    "linear": {},
    "yarn": dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""Options of each scaling type besides `factor`, with their defaults; None leaves the default to transformers."""


def extend_context(
    config: PretrainedConfig, scaling: str | Mapping[str, Any] | None, max_positions: int | None
) -> None:
    """Changes the configuration of a model so that its rotary positions support longer sequences.

    The scaling replaces the saved one. If several types of layers have their own rotary positions, those of full
    attention are scaled, because the others attend within a window.

    Args:
        config: Configuration of any model. Its text configuration is changed in place.
        scaling: `rope_type` (linear, yarn, llama3), `factor` and options as in transformers, or only the type.
        max_positions: Number of tokens in the longest sequence; None to derive it from the factor. Without a scaling,
            positions are not scaled.

    Raises:
        ValueError: The model has no rotary positions, the type or an option is unknown, or the factor is not defined.
    """
    if scaling is None and max_positions is None:
        return
    text = config.get_text_config()
    saved = getattr(text, "rope_parameters", None)
    if not saved:
        name = "model.rope_scaling" if scaling is not None else "model.max_position_embeddings"
        raise ValueError(f"{name}: models of type {text.model_type} have no rotary positions to scale; leave it out")
    if scaling is not None:
        given = {"rope_type": scaling} if isinstance(scaling, str) else dict(scaling)
        nested = all(isinstance(part, Mapping) for part in saved.values())
        of_full_attention = saved.get("full_attention", {}) if nested else saved
        original = int(given.get(_ORIGINAL) or of_full_attention.get(_ORIGINAL) or text.max_position_embeddings)
        own = _scaled(of_full_attention, given, original, max_positions)
        text.rope_parameters = {**saved, "full_attention": own} if nested else own
        max_positions = max_positions or round(own["factor"] * original)
    text.max_position_embeddings = max_positions


def warn_of_long_sequences(config: PretrainedConfig, seq_len: int) -> None:
    """Warns if sequences have more tokens than a saved model has positions.

    Args:
        config: Configuration of the model, after :func:`extend_context`.
        seq_len: Tokens of a sequence.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None or seq_len <= limit:
        return
    remedy = f"give model.rope_scaling=yarn model.max_position_embeddings={seq_len}, or lower data.seq_len"
    if not getattr(text, "rope_parameters", None):
        remedy = f"models of type {text.model_type} have no rotary positions to scale; lower data.seq_len"
    rank_zero_warn(
        f"data.seq_len={seq_len}: the model of model.path knows {limit} positions, and beyond them the loss starts far "
        f"too high; {remedy}"
    )


def _scaled(
    saved: Mapping[str, Any], given: dict[str, Any], original: int, max_positions: int | None
) -> dict[str, Any]:
    """Returns `rope_parameters` of the given type. `original` is the number of positions the model was trained on."""
    kind = given.pop("rope_type", None)
    if kind not in _OPTIONS:
        raise ValueError(f"model.rope_scaling: rope_type={kind}: give one of {', '.join(_OPTIONS)}")
    unknown = sorted(given.keys() - _OPTIONS[kind].keys() - {"factor", _ORIGINAL})
    if unknown:
        allowed = ", ".join(["factor", _ORIGINAL, *_OPTIONS[kind]])
        raise ValueError(f"model.rope_scaling: {kind} has no {', '.join(unknown)}; give any of {allowed}")
    if given.get("factor") is None and max_positions is None:
        raise ValueError(f"model.rope_scaling={kind}: by how much? Give its factor, or model.max_position_embeddings")
    factor = float(given.pop("factor", None) or (max_positions or 0) / original)
    if factor < 1:
        raise ValueError(
            f"model.rope_scaling: factor={factor:g}: give 1 or more; the model was trained on {original} positions"
        )
    kept = {name: saved[name] for name in ("rope_theta", "partial_rotary_factor") if name in saved}
    options = {name: value for name, value in {**_OPTIONS[kind], **given}.items() if value is not None}
    if kind != "linear":
        options[_ORIGINAL] = original
    else:
        options.pop(_ORIGINAL, None)
    return {"rope_type": kind, "factor": factor, **options, **kept}
