"""Model shapes from Hugging Face configurations, read as plain data: transformers is not imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_memo.shapes.model_shape import Kernels, ModelShape

_FILE: Final = "config.json"
_NAMES: Final = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts"),
    "active_experts": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "ffn_of_hidden": ("expansion_ratio",),
}
"""What families call one thing."""
_MOST: Final = {"layers": 2**13, "heads": 2**16, "kv_heads": 2**16, "head_dim": 2**16}
_MOST_OF_OTHERS: Final = 2**24
"""Far beyond any model; larger ones would only take all memory and time of this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What the model type alone tells; defaults are those of the Hugging Face class, which configurations leave out."""

    gated: bool
    kernels: Kernels
    """Measured for Llama, Qwen3, GPT-NeoX and GPT-2; others have those of the nearest of these."""

    tied: bool = False
    head_dim: int | None = None
    """None: that of the hidden size divided among the heads."""

    ffn_of_hidden: int | None = None
    """The feed-forward is that many times the hidden size where the configuration does not say."""

    mixture: bool = False
    window: int | None = None
    one_kv_head: bool = False
    """Queries of all heads share keys and values, unless `multi_query` is false."""


_FAMILIES: Final = {
    "llama": _Family(gated=True, kernels="llama"),
    "mistral": _Family(gated=True, kernels="llama", window=4096),
    "qwen2": _Family(gated=True, kernels="llama"),
    "qwen3": _Family(gated=True, kernels="qwen3", head_dim=128),
    "gemma": _Family(gated=True, kernels="llama", tied=True, head_dim=256),
    "phi3": _Family(gated=True, kernels="llama"),
    "olmo": _Family(gated=True, kernels="llama"),
    "olmo2": _Family(gated=True, kernels="llama"),
    "granite": _Family(gated=True, kernels="llama"),
    "cohere": _Family(gated=True, kernels="llama", tied=True),
    "stablelm": _Family(gated=True, kernels="llama"),
    "glm": _Family(gated=True, kernels="llama", head_dim=128),
    "glm4": _Family(gated=True, kernels="llama", head_dim=128),
    "smollm3": _Family(gated=True, kernels="llama", tied=True),
    "seed_oss": _Family(gated=True, kernels="llama", head_dim=128),
    "mixtral": _Family(gated=True, kernels="llama", mixture=True),
    "qwen3_moe": _Family(gated=True, kernels="qwen3", mixture=True),
    "olmoe": _Family(gated=True, kernels="llama", mixture=True),
    "granitemoe": _Family(gated=True, kernels="llama", mixture=True),
    "phimoe": _Family(gated=True, kernels="llama", mixture=True),
    "starcoder2": _Family(gated=False, kernels="gpt_neox", tied=True),
    "phi": _Family(gated=False, kernels="gpt_neox_parallel"),
    "nemotron": _Family(gated=False, kernels="gpt_neox"),
    "gpt_neox": _Family(gated=False, kernels="gpt_neox_parallel"),
    "opt": _Family(gated=False, kernels="gpt_neox", tied=True),
    "gpt2": _Family(gated=False, kernels="gpt2", tied=True, ffn_of_hidden=4),
    "gptj": _Family(gated=False, kernels="gpt_neox_parallel", ffn_of_hidden=4),
    "codegen": _Family(gated=False, kernels="gpt_neox_parallel", ffn_of_hidden=4),
    "bloom": _Family(gated=False, kernels="gpt_neox", tied=True, ffn_of_hidden=4),
    "mpt": _Family(gated=False, kernels="gpt_neox", tied=True, ffn_of_hidden=4),
    "falcon": _Family(gated=False, kernels="gpt_neox_parallel", tied=True, ffn_of_hidden=4, one_kv_head=True),
    "gpt_bigcode": _Family(gated=False, kernels="gpt_neox", tied=True, ffn_of_hidden=4, one_kv_head=True),
}
"""Decoders whose layers are alike; a gated feed-forward has three matrices, one that is not has two."""


def load_shape(path: Path) -> ModelShape:
    """Read the shape of a saved Hugging Face model.

    Args:
        path: its folder, or its `config.json`.

    Raises:
        ValueError: there is none, or it tells no shape; one line.
    """
    file = path / _FILE if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "can't be read"
        raise ValueError(f"{file}: {reason}; give the folder or the {_FILE} of a Hugging Face model") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{file}: no JSON; give the folder or the {_FILE} of a Hugging Face model") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: no JSON object; give the folder or the {_FILE} of a Hugging Face model")
    try:
        return shape_of(config, file.resolve().parent.name if file.name == _FILE else file.stem)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a configuration describes; of a model of images and text, that of its text part.

    Args:
        config: as in `config.json`.
        name: what the model is called.

    Raises:
        ValueError: the type of model is not known, its layers differ, or a size is missing or impossible.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        # What text and images share stands outside.
        return shape_of({"tie_word_embeddings": config.get("tie_word_embeddings"), **text}, name)
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ValueError(
            f"model_type={str(model_type)[:40]!r} is not one whose layers are known: {', '.join(sorted(_FAMILIES))}"
        )
    _check_alike(config)
    hidden, heads = _size(config, "hidden"), _size(config, "heads")
    if family.head_dim is None and _given(config, "head_dim") is None and hidden % heads:
        raise ValueError(f"{heads} heads do not divide the hidden size, {hidden}, and there is no head_dim")
    return ModelShape(
        name=name,
        layers=_size(config, "layers"),
        hidden=hidden,
        ffn=_ffn(config, family, hidden),
        heads=heads,
        kv_heads=_kv_heads(config, family, heads),
        head_dim=_size(config, "head_dim", family.head_dim or hidden // heads),
        vocab=_size(config, "vocab"),
        gated=family.gated,
        tied=_flag(config, "tie_word_embeddings", family.tied),
        experts=_size(config, "experts") if family.mixture else 1,
        active_experts=_size(config, "active_experts") if family.mixture else 1,
        window=_window(config, family),
        kernels=_kernels(config, family),
    )


def _check_alike(config: Mapping[str, Any]) -> None:
    given = config.get("layer_types") or ()
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"layer_types is {str(given)[:40]!r}, and has to be a list of one kind for each layer")
    kinds = sorted(set(map(str, given)))
    if len(kinds) > 1:
        raise ValueError(f"its layers differ ({', '.join(kinds)}), and an estimate is of layers that are alike")
    if config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) != 1:
        raise ValueError("only some of its layers have experts, and an estimate is of layers that are alike")


def _ffn(config: Mapping[str, Any], family: _Family, hidden: int) -> int:
    if family.mixture and _given(config, "expert_ffn") is not None:
        return _size(config, "expert_ffn")
    times = _size(config, "ffn_of_hidden", family.ffn_of_hidden) if family.ffn_of_hidden else 0
    return _size(config, "ffn", times * hidden or None)


def _kv_heads(config: Mapping[str, Any], family: _Family, heads: int) -> int:
    if family.one_kv_head and not config.get("new_decoder_architecture"):
        return 1 if _flag(config, "multi_query", True) else heads
    return _size(config, "kv_heads", heads)


def _kernels(config: Mapping[str, Any], family: _Family) -> Kernels:
    one_after_the_other = not _flag(config, "use_parallel_residual", True)
    return "gpt_neox" if family.kernels == "gpt_neox_parallel" and one_after_the_other else family.kernels


def _window(config: Mapping[str, Any], family: _Family) -> int | None:
    if not config.get("use_sliding_window", True):
        return None
    window = config.get("sliding_window", family.window)
    if window is None:
        return None
    if not _is_size(window):
        raise ValueError(f"sliding_window={str(window)[:40]!r} is no number of keys: give 1 or more, or null")
    return int(window)


def _given(config: Mapping[str, Any], what: str) -> Any:
    return next((config[name] for name in _NAMES[what] if config.get(name) is not None), None)


def _size(config: Mapping[str, Any], what: str, default: int | None = None) -> int:
    value = _given(config, what)
    if value is None and default is not None:
        return default
    names = " or ".join(_NAMES[what])
    if value is None:
        raise ValueError(f"{names} is missing")
    most = _MOST.get(what, _MOST_OF_OTHERS)
    if not _is_size(value) or value > most:
        raise ValueError(f"{names} is {str(value)[:40]!r}, and has to be an integer from 1 to {most}")
    return int(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**40


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    return default if value is None else bool(value)
