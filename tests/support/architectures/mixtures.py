"""Small mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from support.families import BALANCED, VOCABULARY

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 1024, "pad_token_id": 0,
    "use_cache": False,
}  # fmt: skip


def _build(config_class: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, config_class)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():  # some models begin with experts of zeros
        if "experts" in name or "sinks" in name:
            nn.init.normal_(p, std=0.05)
    return model


def gpt_oss(**sizes: Any) -> nn.Module:
    return _build(
        "GptOssConfig",
        **_SIZES | {"head_dim": 8, "intermediate_size": 32, "num_local_experts": 4, "sliding_window": 16} | sizes,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )


def deepseek_v3(**sizes: Any) -> nn.Module:
    return _build(
        "DeepseekV3Config",
        **_SIZES
        | {"num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 16}
        | {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        | sizes,
    )


def lopsided(**sizes: Any) -> nn.Module:
    """Return a mixture in which all tokens go to the first two of eight experts."""
    model = deepseek_v3(**{"n_group": 1, "first_k_dense_replace": 0} | sizes)
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias[:2] += 10.0
    return model


MIXTURES: dict[str, str | Callable[..., nn.Module]] = {
    **{family: family for family in BALANCED},
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "lopsided": lopsided,
}
"""Families of runs, by name."""
