"""Sizes in Hugging Face configurations, which name the same size differently by model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NAMES: Final = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "ffn_of_hidden": ("expansion_ratio",),
    "query_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rotated": ("qk_rope_head_dim",),
    "unrotated": ("qk_nope_head_dim",),
    "value": ("v_head_dim",),
}
"""Names that configurations of different model families use for the same size."""
_MOST: Final = {"layers": 2**13, "heads": 2**16, "kv_heads": 2**16, "head_dim": 2**16}
_MOST_OF_OTHERS: Final = 2**24
"""Maximum of the other sizes, far beyond any model. Larger sizes would exhaust memory and time."""


def given(config: Mapping[str, Any], what: str) -> Any:
    """Return a size as the configuration gives it, or None."""
    return next((config[name] for name in _NAMES[what] if config.get(name) is not None), None)


def config_size(config: Mapping[str, Any], what: str, default: int | None = None) -> int:
    """Return a size.

    Raises:
        ValueError: It is missing and has no default, or is not a possible size. The message is one line.
    """
    value = given(config, what)
    if value is None and default is not None:
        return default
    names = " or ".join(_NAMES[what])
    if value is None:
        raise ValueError(f"{names} is missing")
    most = _MOST.get(what, _MOST_OF_OTHERS)
    if not is_size(value) or value > most:
        raise ValueError(f"{names} is {str(value)[:40]!r}, but must be an integer from 1 to {most}")
    return int(value)


def is_size(value: Any) -> bool:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**40


def flag_of(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a flag, or its default if it is missing or null."""
    value = config.get(name)
    return default if value is None else bool(value)
