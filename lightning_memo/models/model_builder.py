"""Builds Hugging Face causal language models from a configuration a local folder or the Hub, optionally with LoRA."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from lightning_utilities.core.imports import RequirementCache
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from lightning_memo.models.context_extension import extend_context
from lightning_memo.models.liger import apply_liger, check_liger, restore_rotary
from lightning_memo.shapes.hub_folder import MODEL_FILES, hub_folder
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
    `lightning_memo.models.context_extension.extend_context`."""
    max_position_embeddings: int | str | None = None
    """Number of tokens in the longest sequence, as a number or like "128K"; None for the saved number, or the one that
    follows from ``rope_scaling``."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `peft.LoraConfig`, including ``r``. Empty, or with ``r`` 0, all weights are trained."""
    liger: bool = False
    """Whether to use liger-kernel for norms, rotary positions and feed-forward layers, on a GPU; see
    `lightning_memo.models.liger.apply_liger`."""
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


def load_hf_config(model: ModelConfig) -> PretrainedConfig:
    """Returns the Hugging Face configuration, with the key-value cache off.

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
    extend_context(config, model.rope_scaling, positions)
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


def build_model(model: ModelConfig, device: torch.device | None = None) -> nn.Module:
    """Returns the model in torch's default dtype, which Lightning sets according to the trainer's precision.

    Args:
        model: Settings of the model.
        device: Device on which the model will run; None for a GPU if there is one.

    Raises:
        ValueError: As for `load_hf_config`. In addition, LoRA needs peft and peft is not installed or does not know an
            argument, or liger-kernel cannot run.
    """
    if model.liger:
        check_liger(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config, dtype, folder = load_hf_config(model), torch.get_default_dtype(), model.folder
    adapters = _lora_config(model.lora)  # before weights are read
    if folder is None:
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    else:
        network = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)
    network.train()  # from_pretrained returns the model in eval mode
    (apply_liger if model.liger else restore_rotary)(network)
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
