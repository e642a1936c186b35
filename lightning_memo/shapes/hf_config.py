"""Hugging Face models without transformers: the folder of a model, and its shape by the names of its family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from lightning_memo.shapes.model_shape import ExpertLayer, Kernels, LatentAttention, ModelShape, RouterKind

_FILE: Final = "config.json"
CONFIG_FILES: Final = (_FILE,)
TOKENIZER_FILES: Final = ("*.json", "*.jinja", "*.model", "*.txt")
MODEL_FILES: Final = (*TOKENIZER_FILES, "*.safetensors")

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(path: str) -> bool:
    """Whether a path does not exist and has the form of an id of the Hub."""
    return not Path(path).exists() and _HUB_ID.fullmatch(path) is not None


@cache
def hub_folder(path: str, files: tuple[str, ...], setting: str) -> Path:
    """Return the path, or the folder of downloaded files if the path does not exist and has the form of a Hub id.

    Files that were downloaded before are taken from the cache of huggingface_hub.

    Args:
        path: Path, or an id like "meta-llama/Llama-3.1-8B".
        files: Patterns of the files to download.
        setting: Name of the setting, for messages.

    Raises:
        ValueError: The files cannot be downloaded. The message has the command that downloads them.
    """
    if not is_hub_id(path):
        return Path(path)
    # Takes a third of a second, and is not needed for local folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    name = path.rpartition("/")[2]
    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except GatedRepoError:
        reason = f"its terms have to be accepted at https://huggingface.co/{path}, by the user of `hf auth login`"
    except RepositoryNotFoundError:
        reason = "the Hub has no such model, or it is private and needs `hf auth login`"
    except (OSError, ValueError) as error:
        reason = f"HF_HUB_OFFLINE is set, or the Hub cannot be reached: {str(error).partition(chr(10))[0]}"
    raise ValueError(
        f"{setting}={path}: no such folder, and no download from the Hub ({reason}): run `hf download {path} "
        f"--local-dir {name}` where that is possible, and give {setting}={name}"
    )


_WINDOW, _FULL = "sliding_attention", "full_attention"
_KNOWN: Final = {_WINDOW, _FULL}

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

    router: RouterKind | None = None
    """Router of a mixture of experts; None for dense models."""

    shared_gate: bool = False
    dense_first: int = 0
    """Number of layers without experts before the others, if the configuration does not specify it."""

    latent: bool = False
    window: int | None = None
    alternates: bool = False
    """Whether the window is that of every second layer, from the first on, if the configuration does not say."""

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
    "mixtral": _Family(gated=True, kernels="llama", router="softmax_fp32"),
    "qwen3_moe": _Family(gated=True, kernels="qwen3", router="softmax"),
    "olmoe": _Family(gated=True, kernels="llama", router="softmax"),
    "granitemoe": _Family(gated=True, kernels="llama", router="chosen_softmax"),
    "phimoe": _Family(gated=True, kernels="llama", router="chosen_softmax"),
    "qwen2_moe": _Family(gated=True, kernels="llama", router="softmax", shared_gate=True),
    "deepseek_v3": _Family(gated=True, kernels="llama", router="sigmoid", dense_first=3, latent=True),
    "glm4_moe": _Family(gated=True, kernels="llama", router="sigmoid", dense_first=1),
    "gpt_oss": _Family(gated=True, kernels="gpt_oss", router="gpt_oss", head_dim=64, window=128, alternates=True),
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
"""Decoders of attention and feed-forward. A gated feed-forward has three matrices, any other has two."""


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
        ValueError: The model type or the type of a layer is unknown, or a size is missing or impossible.
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
    hidden, heads = _config_size(config, "hidden"), _config_size(config, "heads")
    latent = _latent(config) if family.latent else None
    if latent is None and family.head_dim is None and _given(config, "head_dim") is None and hidden % heads:
        raise ValueError(f"the hidden size {hidden} is not a multiple of the {heads} heads, and head_dim is missing")
    head_dim = family.head_dim or hidden // heads
    shape = ModelShape(
        name=name,
        layers=_config_size(config, "layers"),
        hidden=hidden,
        ffn=_ffn(config, family, hidden),
        heads=heads,
        kv_heads=heads if latent else _kv_heads(config, family, heads),
        head_dim=latent.unrotated + latent.rotated if latent else _config_size(config, "head_dim", head_dim),
        vocab=_config_size(config, "vocab"),
        gated=family.gated,
        tied=_flag_of(config, "tie_word_embeddings", family.tied),
        experts=_config_size(config, "experts") if family.router else 1,
        active_experts=_config_size(config, "active_experts") if family.router else 1,
        expert_layer=_expert_layer(config, family),
        latent=latent,
        window=_window(config, family),
        kernels=_kernels(config, family),
    )
    return _with_parts(shape, config, family.dense_first, family.alternates)


def _expert_layer(config: Mapping[str, Any], family: _Family) -> ExpertLayer:
    if family.router is None:
        return ExpertLayer()
    always = family.router in ("softmax_fp32", "sigmoid")
    return ExpertLayer(
        router=family.router,
        normalized=_flag_of(config, "norm_topk_prob", always) or family.router == "softmax_fp32",
        groups=config.get("n_group") or 1,
        chosen_groups=config.get("topk_group") or 1,
        shared_ffn=_shared_ffn(config),
        shared_gate=family.shared_gate,
    )


def _shared_ffn(config: Mapping[str, Any]) -> int:
    if _given(config, "shared_ffn") is not None:
        return _config_size(config, "shared_ffn")
    return (
        _config_size(config, "shared_experts") * _config_size(config, "expert_ffn")
        if config.get("n_shared_experts")
        else 0
    )


def _latent(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        query_rank=_config_size(config, "query_rank") if config.get("q_lora_rank") is not None else 0,
        kv_rank=_config_size(config, "kv_rank"),
        rotated=_config_size(config, "rotated"),
        unrotated=_config_size(config, "unrotated"),
        value=_config_size(config, "value"),
    )


def _ffn(config: Mapping[str, Any], family: _Family, hidden: int) -> int:
    if family.router and _given(config, "expert_ffn") is not None:
        return _config_size(config, "expert_ffn")
    times = _config_size(config, "ffn_of_hidden", family.ffn_of_hidden) if family.ffn_of_hidden else 0
    return _config_size(config, "ffn", times * hidden or None)


def _kv_heads(config: Mapping[str, Any], family: _Family, heads: int) -> int:
    if family.one_kv_head and not config.get("new_decoder_architecture"):
        return 1 if _flag_of(config, "multi_query", True) else heads
    return _config_size(config, "kv_heads", heads)


def _kernels(config: Mapping[str, Any], family: _Family) -> Kernels:
    if family.kernels == "llama" and config.get("use_qk_norm"):
        return "qwen3"
    one_after_the_other = not _flag_of(config, "use_parallel_residual", True)
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


def _with_parts(shape: ModelShape, config: Mapping[str, Any], dense_first: int, alternates: bool) -> ModelShape:
    """Return the shape with its parts, if its layers differ.

    Args:
        shape: Shape whose layers all have experts, if any, and a window, if any.
        config: Content of `config.json`.
        dense_first: Number of layers without experts before the others, if the configuration does not specify it.
        alternates: Whether every second layer has no window, if the configuration does not specify it.

    Raises:
        ValueError: A layer has a type that is not known, or a list of layers is not one. The message is one line.
    """
    windows = [None if kind == _FULL else shape.window for kind in _types(config, shape, alternates)]
    dense = _without_experts(config, shape, dense_first)
    dense_ffn = _config_size(config, "ffn") if dense else 0
    parts = []
    for (window, is_dense), members in groupby(range(shape.layers), lambda n: (windows[n], n in dense)):
        part = replace(shape, layers=len(list(members)), window=window)
        if is_dense:
            part = replace(part, experts=1, active_experts=1, expert_layer=ExpertLayer(), ffn=dense_ffn)
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return replace(shape, window=None if None in windows else shape.window, parts=tuple(parts))


def _types(config: Mapping[str, Any], shape: ModelShape, alternates: bool) -> Sequence[str]:
    """Type of each layer."""
    given = config.get("layer_types") or ()
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"layer_types is {str(given)[:40]!r}, but must be a list with the type of each layer")
    types = [str(each) for each in given]
    if not types:
        return [_FULL if alternates and number % 2 else _WINDOW for number in range(shape.layers)]
    if len(types) != shape.layers:
        raise ValueError(f"layer_types has {len(types)} entries, but must have one for each of {shape.layers} layers")
    if unknown := sorted(set(types) - _KNOWN):
        raise ValueError(
            f"layers of type {', '.join(unknown)[:80]} are not estimated; layer_types may have {_WINDOW} and {_FULL}"
        )
    return types


def _without_experts(config: Mapping[str, Any], shape: ModelShape, dense_first: int) -> set[int]:
    """Numbers of the layers without experts in a mixture."""
    if shape.experts == 1:
        return set()
    first = _count(config, "first_k_dense_replace", dense_first)
    step = _count(config, "decoder_sparse_step", 1) or 1
    only = config.get("mlp_only_layers") or ()
    if not isinstance(only, (list, tuple)):
        raise ValueError(f"mlp_only_layers is {str(only)[:40]!r}, but must be a list of the layers without experts")
    return {n for n in range(shape.layers) if n < first or n in only or (n + 1) % step}


def _count(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if value != 0 and not _is_size(value):
        raise ValueError(f"{name} is {str(value)[:40]!r}, but must be an integer of at least 0")
    return int(value)


def _given(config: Mapping[str, Any], size: str) -> Any:
    """Return a size as the configuration gives it, or None."""
    return next((config[name] for name in _NAMES[size] if config.get(name) is not None), None)


def _config_size(config: Mapping[str, Any], size: str, default: int | None = None) -> int:
    """Return a size.

    Raises:
        ValueError: It is missing and has no default, or is not a possible size. The message is one line.
    """
    value = _given(config, size)
    if value is None and default is not None:
        return default
    names = " or ".join(_NAMES[size])
    if value is None:
        raise ValueError(f"{names} is missing")
    most = _MOST.get(size, _MOST_OF_OTHERS)
    if not _is_size(value) or value > most:
        raise ValueError(f"{names} is {str(value)[:40]!r}, but must be an integer from 1 to {most}")
    return int(value)


def _is_size(value: Any) -> bool:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**40


def _flag_of(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a flag, or its default if it is missing or null."""
    value = config.get(name)
    return default if value is None else bool(value)
