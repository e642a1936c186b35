"""Reads model shapes from Hugging Face configurations without importing transformers."""

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
"""Names that configurations of different model families use for the same size."""
_MOST: Final = {"layers": 2**13, "heads": 2**16, "kv_heads": 2**16, "head_dim": 2**16}
_MOST_OF_OTHERS: Final = 2**24
"""Maximum of the other sizes, far beyond any model. Larger sizes would exhaust memory and time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Properties that follow from the model type, with the defaults of the Hugging Face configuration class."""

    gated: bool
    kernels: Kernels
    """Measured for Llama, Qwen3, GPT-NeoX and GPT-2. Other families use the most similar of these."""

    tied: bool = False
    head_dim: int | None = None
    """Size of a head; None for the hidden size divided by the number of heads."""

    ffn_of_hidden: int | None = None
    """Ratio of feed-forward to hidden size if the configuration does not specify the feed-forward size."""

    mixture: bool = False
    window: int | None = None
    one_kv_head: bool = False
    """Whether all heads share keys and values, unless `multi_query` is false."""


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
"""Decoders with equal layers. A gated feed-forward has three matrices, any other has two."""


def load_shape(path: Path) -> ModelShape:
    """Read the shape of a saved Hugging Face model.

    Args:
        path: Folder of the model, or its `config.json`.

    Raises:
        ValueError: The file is missing or does not describe a supported shape. The message is one line.
    """
    file = path / _FILE if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ValueError(f"{file}: {reason}; give the folder or the {_FILE} of a Hugging Face model") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{file}: not JSON; give the folder or the {_FILE} of a Hugging Face model") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not a JSON object; give the folder or the {_FILE} of a Hugging Face model")
    try:
        return shape_of(config, file.resolve().parent.name if file.name == _FILE else file.stem)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Shape that a configuration describes. For a model of images and text, this is the shape of its text part.

    Args:
        config: Content of `config.json`.
        name: Name of the model.

    Raises:
        ValueError: The model type is unknown, the layers differ, or a size is missing or impossible.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        # Settings that apply to text and images are outside of text_config.
        return shape_of({"tie_word_embeddings": config.get("tie_word_embeddings"), **text}, name)
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ValueError(
            f"model_type={str(model_type)[:40]!r} is not supported; supported are {', '.join(sorted(_FAMILIES))}"
        )
    _check_alike(config)
    hidden, heads = _size(config, "hidden"), _size(config, "heads")
    if family.head_dim is None and _given(config, "head_dim") is None and hidden % heads:
        raise ValueError(f"the hidden size {hidden} is not a multiple of the {heads} heads, and head_dim is missing")
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
        raise ValueError(f"layer_types is {str(given)[:40]!r}, but must be a list with the type of each layer")
    types = sorted(set(map(str, given)))
    if len(types) > 1:
        raise ValueError(f"the layers differ ({', '.join(types)}), but the estimate supports only equal layers")
    if config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) != 1:
        raise ValueError("only some of the layers have experts, but the estimate supports only equal layers")


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
        raise ValueError(f"sliding_window={str(window)[:40]!r} is not a number of keys: give 1 or more, or null")
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
        raise ValueError(f"{names} is {str(value)[:40]!r}, but must be an integer from 1 to {most}")
    return int(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**40


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    return default if value is None else bool(value)
