"""Tiny configurations of the model types that transformers registers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from model_types.sizes import CHANGES, DERIVED, SUB_CONFIGS

VOCABULARY = 128
FIRST_TOKEN, LAST_TOKEN = 16, 96  # tokens that texts consist of; those before and after have special meanings
_LAYERS, _EXPERTS = 4, 4
# Sizes by the names of attributes. The first pattern that matches the whole name is used.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(mamba_n|n_mamba|mamba_num|num_v)_heads|.*(hash|mem|register|index|mtp|nextn).*", 0),  # 0 keeps the value
    (r"num_(en|de)coder_layers|(n|num|num_hidden|encoder|decoder|num_attention)_layers?|depth", _LAYERS),
    (r".*(kv|key_value)_heads?|num_heads_kv|n_head_kv|multi_query_group_num", 2),
    (r".*(n|num)_heads?|.*attention_heads", 4),
    (r".*(head_dim|d_kv|head_size|channels_per_head)", 8),
    (r".*(q|kv|o|index)_lora_rank", 16),
    (r".*(moe|expert|shared).*intermediate_size", 32),
    (r".*intermediate_size|.*ffn_dim|d_ff|d_inner|ffn_hidden_size|inner_dim|n_inner|dim_ff", 64),
    (r".*hidden_size|.*d_model|n_embd|dim|embed_dim|embedding_size|.*proj(ection)?_dim|hidden_dim|dim_model", 32),
    (r"emb_dim|d_embed|embed_size|output_dim|num_hiddens|adapter_(in|out)_dim|adapter_input_size", 32),
    (r".*vocab_size(_per_layer_input)?", VOCABULARY),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"(n|num)_(routed_|local_|shared_|zero_|null_)*experts|moe_num_experts", _EXPERTS),
    (r".*(top_?k|experts_per_tok(en)?)|moe_k", 2),
    (r"sliding_window|attention_chunk_size|attention_window_size|window_size", 16),
    (r"(mamba_|ssm_)?(d_)?(state|state_size)", 8),
    (r".*chunk_size", 16),
    (r"image_size", 32),
    (r"patch_size", 8),
)
_DERIVED = {"per_layer_config", "qk_head_dim"}  # the classes compute them from other sizes
_SPECIAL_TOKEN = re.compile(r".*token_(id|index)|boi_token_index|.*_start_token|.*_end_token")
_DROPOUT = re.compile(r".*(drop|pdrop|layerdrop|jitter).*")


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Returns a configuration with few layers and small widths, and without dropout.

    Args:
        model_type: Name under which transformers registers the configuration.

    Raises:
        Exception: Whatever the class of the configuration raises if it does not accept these sizes.
    """
    kind = CONFIG_MAPPING[model_type]
    parts = {name: tiny_config(part).to_dict() for name, part in SUB_CONFIGS.get(model_type, {}).items()}
    config: PreTrainedConfig = kind.from_dict(_tiny(parts or kind().to_dict(), model_type, _Tokens()))
    return config


class _Tokens:
    """New ids for special tokens. Equal ids stay equal."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    def small(self, token: int) -> int:
        if token < FIRST_TOKEN:
            return token
        return self._ids.setdefault(token, LAST_TOKEN + len(self._ids))


def _tiny(values: dict[str, Any], where: str, tokens: _Tokens) -> dict[str, Any]:
    changes = CHANGES.get(where, {})
    counted = [values[name] for name in values if re.fullmatch(_SIZES[1][0], name) and isinstance(values[name], int)]
    made = {}
    for name, value in values.items():
        if name in changes:
            made[name] = changes[name]
        elif isinstance(value, dict) and (f"{where}.{name}" in CHANGES or "model_type" in value):
            part = f"{where}.{name}" if f"{where}.{name}" in CHANGES else value["model_type"]
            made[name] = _tiny(value, part, tokens)
        elif isinstance(value, list) and value and len(value) in counted:
            made[name] = _spread(value)
        else:
            made[name] = _small(name, value, tokens)
    made |= changes
    if "kv_lora_rank" in made and made["kv_lora_rank"] and "num_attention_heads" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]  # keys and values of all heads share one projection
    for rope in (made.get("rope_parameters"), made.get("rope_scaling")):
        if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
            rope["mrope_section"] = _sections(made, rope)
    return {name: value for name, value in made.items() if value is not DERIVED and name not in _DERIVED}


def _sections(values: dict[str, Any], rope: dict[str, Any]) -> list[int]:
    """Returns how many rotary frequencies belong to time, height and width."""
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    rotated = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    count = int(head_dim * rotated) // 2
    side = max(count // 4, 1)
    return [count - 2 * side, side, side] if count > 2 else [1, count - 1, 0]


def _small(name: str, value: Any, tokens: _Tokens) -> Any:
    if isinstance(value, float) and _DROPOUT.fullmatch(name):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, list)):
        return value
    if _SPECIAL_TOKEN.fullmatch(name):
        if isinstance(value, list):
            return [tokens.small(each) if isinstance(each, int) else each for each in value]
        return tokens.small(value)
    if isinstance(value, list):
        return value
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), 0)
    return min(value, size) if size and value > 0 else value


def _spread(values: list[Any]) -> list[Any]:
    """Returns as many entries as there are layers, with each different entry if possible."""
    distinct = [value for number, value in enumerate(values) if value not in values[:number]]
    return (distinct * _LAYERS)[:_LAYERS] if len(distinct) <= _LAYERS else values[:_LAYERS]


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Iterates over a configuration and those of its parts."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)
