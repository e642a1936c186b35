"""Builds Hugging Face causal language models, from a configuration, a local folder or the Hub.

Options: LoRA, and positions that are scaled to sequences longer than a model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.imports import RequirementCache
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from lightning_memo.shapes.hf_config import MODEL_FILES, hub_folder
from lightning_memo.utils.units import read_length

_PEFT = RequirementCache("peft>=0.18")
_PEFTS_OWN = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "megatron_config", "megatron_core",
)  # fmt: skip
"""Arguments of `peft.LoraConfig` that are not training settings. The module that `megatron_core` names is imported, and
a checkpoint could name any."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of the model to train.

    Raises:
        ValueError: Neither ``config`` nor ``path`` is given, or ``lora`` has no ``r``.
    """

    config: Mapping[str, Any] | None = None
    """``model_type`` and arguments of its Hugging Face configuration class. Weights are random."""
    path: str | None = None
    """Folder of a saved Hugging Face model, or its id on the Hub. If it is given, ``config`` is ignored."""
    rope_scaling: str | Mapping[str, Any] | None = None
    """Scaling of rotary positions for sequences longer than the model was trained on; None to keep the saved one. See
    `lightning_memo.models.model_builder.extend_context`."""
    max_position_embeddings: int | str | None = None
    """Number of tokens in the longest sequence, as a number or like "128K"; None for the saved number, or the one that
    follows from ``rope_scaling``."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `peft.LoraConfig`, including ``r``. Empty, or with ``r`` 0, all weights are trained."""
    gradient_checkpointing: bool = False
    """Whether to use Hugging Face's full activation recomputation, without swapping."""

    def __post_init__(self) -> None:
        if self.config is None and self.path is None:
            raise ValueError("model: give model.config (random weights) or model.path (the folder of a saved model)")
        if not isinstance(self.lora, Mapping):
            raise ValueError(f"model.lora={self.lora} is no group of settings: give model.lora.r, the rank, like 8")
        if self.lora and "r" not in self.lora:
            raise ValueError(
                f"model.lora has {', '.join(self.lora)}, but no r: give the rank of the adapters, r, or r=0 to train"
                " all weights"
            )

    @property
    def folder(self) -> str | None:
        """Folder that the model is loaded from, downloaded if ``path`` is an id on the Hub; None for ``config``.

        Raises:
            ValueError: The download fails.
        """
        return None if self.path is None else str(hub_folder(self.path, MODEL_FILES, "model.path"))


def load_hf_config(model: ModelConfig, warns: bool = False) -> PretrainedConfig:
    """Returns the Hugging Face configuration, with the key-value cache off.

    Args:
        model: Settings of the model.
        warns: Whether to warn if positions are scaled in another way than those that the model was trained on.

    Raises:
        ValueError: The folder is no saved model, the model type or its arguments are unknown, or the settings cannot
            scale its positions.
    """
    folder = model.folder
    if folder is None:
        assert model.config is not None
        try:
            config = AutoConfig.for_model(**model.config)
        except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
            raise ValueError(f"model.config: Hugging Face refuses it: {error}") from error
    else:
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(
                f"model.path={model.path}: no config.json there; give the folder of a saved Hugging Face model, or "
                "its id on the Hub"
            )
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.use_cache = False
    longest = model.max_position_embeddings
    positions = None if longest is None else read_length("model.max_position_embeddings", longest)
    replaced = _extend_context(config, model.rope_scaling, positions)
    if warns and replaced:
        rank_zero_warn(f"model.rope_scaling: {replaced}")
    return config


def check_vocabulary(model: ModelConfig, vocab_size: int) -> None:
    """Checks that a model has embeddings for all tokens.

    Args:
        model: Settings of the model.
        vocab_size: Largest id of the tokenizer plus one.

    Raises:
        ValueError: The model's vocabulary is smaller.
    """
    embeddings = load_hf_config(model).get_text_config().vocab_size
    if vocab_size > embeddings:
        raise ValueError(
            f"tokenizer: its ids go up to {vocab_size - 1}, but the model has embeddings for {embeddings};"
            " give the model's own tokenizer, or a larger model.config.vocab_size"
        )


def build_model(model: ModelConfig) -> nn.Module:
    """Returns the model in torch's default dtype, which Lightning sets according to the trainer's precision.

    Args:
        model: Settings of the model.

    Raises:
        ValueError: As for `load_hf_config`. In addition, LoRA needs peft and peft is not installed or does not know an
            argument.
    """
    config, dtype, folder = load_hf_config(model, warns=True), torch.get_default_dtype(), model.folder
    adapters = _lora_config(model.lora)  # before weights are read
    if folder is None:
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    else:
        network = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)
    network.train()  # from_pretrained returns the model in eval mode
    if model.gradient_checkpointing:
        # Older releases of transformers 5 have the second name.
        getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)()
    return network if adapters is None else _with_adapters(network, adapters)


def _lora_config(settings: Mapping[str, Any]) -> Any | None:
    """Returns the `peft.LoraConfig`, or None if all weights are trained."""
    if not settings.get("r"):
        return None
    if not _PEFT:
        raise ValueError(
            f"model.lora.r={settings['r']}: LoRA needs peft; pip install 'lightning-memo[peft]', or set it to 0"
        )
    from peft import LoraConfig

    allowed = [each.name for each in fields(LoraConfig) if each.init and each.name not in _PEFTS_OWN]
    unknown = sorted(settings.keys() - {*allowed})
    if unknown:
        raise ValueError(
            f"model.lora.{unknown[0]}: peft.LoraConfig has no such argument; leave it out, or give one of"
            f" {', '.join(allowed)}"
        )
    return LoraConfig(task_type="CAUSAL_LM", **settings)


def _with_adapters(network: nn.Module, config: Any) -> nn.Module:
    from peft import get_peft_model

    adapted: nn.Module = get_peft_model(network, config)
    return adapted


_ORIGINAL: Final = "original_max_position_embeddings"
_OPTIONS: Final[dict[str, Mapping[str, Any]]] = {
    "linear": {},
    "yarn": dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""Options of each scaling type besides `factor`, with their defaults; None leaves the default to transformers."""


def _extend_context(
    config: PretrainedConfig, scaling: str | Mapping[str, Any] | None, max_positions: int | None
) -> str:
    """Changes the configuration of a model so that its rotary positions support longer sequences.

    The scaling replaces the saved one. If only a type is given, and the model supports `max_positions` already, nothing
    is changed. If several types of layers have their own rotary positions, those of full attention are scaled, because
    the others attend within a window.

    Args:
        config: Configuration of any model. Its text configuration is changed in place.
        scaling: `rope_type` (linear, yarn, llama3), `factor` and options as in transformers, or only the type.
        max_positions: Number of tokens in the longest sequence; None to derive it from the factor. Without a scaling,
            positions are not scaled.

    Returns:
        What replaces another scaling that the model was trained with; empty if nothing does.

    Raises:
        ValueError: The model has no rotary positions, the type or an option is unknown, or the factor is not defined.
    """
    if scaling is None and max_positions is None:
        return ""
    text = config.get_text_config()
    saved = getattr(text, "rope_parameters", None)
    if not saved:
        name = "model.rope_scaling" if scaling is not None else "model.max_position_embeddings"
        raise ValueError(f"{name}: models of type {text.model_type} have no rotary positions to scale; leave it out")
    replaced = ""
    if scaling is not None:
        given = {"rope_type": scaling} if isinstance(scaling, str) else dict(scaling)
        supports = max_positions is not None and max_positions <= text.max_position_embeddings
        if supports and given.keys() == {"rope_type"} and given["rope_type"] in _OPTIONS:
            return ""
        nested = all(isinstance(part, Mapping) for part in saved.values())
        of_full_attention = saved.get("full_attention", {}) if nested else saved
        original = int(given.get(_ORIGINAL) or of_full_attention.get(_ORIGINAL) or text.max_position_embeddings)
        before = of_full_attention.get("rope_type", "default")
        own = _scaled(of_full_attention, given, original, max_positions)
        if before not in ("default", own["rope_type"]):
            replaced = (
                f"{own['rope_type']} replaces {before}, with which the model was trained on "
                f"{text.max_position_embeddings} positions"
            )
        text.rope_parameters = {**saved, "full_attention": own} if nested else own
        max_positions = max_positions or round(own["factor"] * original)
    text.max_position_embeddings = max_positions
    return replaced


def warn_of_long_sequences(config: PretrainedConfig, seq_len: int) -> None:
    """Warns if sequences have more tokens than a saved model has positions.

    Args:
        config: Configuration of the model, after :func:`_extend_context`.
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
