"""Tiny models of transformers whose modules around the layers, or what layers return, are other than Llama's."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from support.families import VOCABULARY

_GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_positions": 128}
_DROPOUT: dict[str, Any] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
_BERT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 64}
_OPT = _SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 1}
OLDER_MODELS: dict[str, dict[str, Any]] = {
    "OPT": _OPT,
    "GPT2": _GPT2 | _DROPOUT,
    "GPTBigCode": _GPT2 | _DROPOUT,
    "CTRL": _GPT2 | _DROPOUT | {"dff": 64},
    "OpenAIGPT": _GPT2 | _DROPOUT,
    "CodeGen": _GPT2 | {"rotary_dim": 4},
    "GPTJ": _GPT2 | {"rotary_dim": 4},
    "Bloom": {"hidden_size": 32, "n_head": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "max_seq_len": 128},
    "Falcon": {"hidden_size": 32, "num_attention_heads": 4},
    "Phi": _SIZES | {"intermediate_size": 64, "resid_pdrop": 0.0},
    "Starcoder2": _SIZES
    | {"intermediate_size": 64, "num_key_value_heads": 2, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "XGLM": {"d_model": 32, "ffn_dim": 64, "attention_heads": 4, "max_position_embeddings": 128}
    | {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    "BioGpt": _SIZES | _BERT | {"activation_dropout": 0.0},
    "Bert": _SIZES | _BERT | {"is_decoder": True},
    "GPTNeoX": _SIZES | {"intermediate_size": 64},
}
"""Settings by the name of the configuration's class without "Config"."""


def make_older(name: str, num_hidden_layers: int = 4, **others: Any) -> nn.Module:
    """Return a model with random weights."""
    kind = getattr(transformers, f"{name}Config")
    layers = {kind.attribute_map.get("num_hidden_layers", "num_hidden_layers"): num_hidden_layers}
    config = kind(**{"vocab_size": VOCABULARY} | OLDER_MODELS[name] | layers | others)
    config.use_cache = False
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model
