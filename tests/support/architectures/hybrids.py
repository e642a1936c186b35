"""Tiny hybrid models of transformers, whose recurrences remember tokens for long."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
_GATED_DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3NextConfig": _GATED_DELTA_NET | _EXPERTS,
    "Qwen3_5TextConfig": _GATED_DELTA_NET | {"rope_parameters": _AXES},
    "OlmoHybridConfig": _GATED_DELTA_NET | {"linear_num_key_heads": 4},
    "BambaConfig": _MAMBA | {"attn_layer_indices": [1]},
    "FalconH1Config": _MAMBA | {"mamba_d_ssm": 64},
    "GraniteMoeHybridConfig": _MAMBA
    | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2, "shared_intermediate_size": 16},
    "NemotronHConfig": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
    },
    "Lfm2Config": {"layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip
"""Settings by class of configuration."""


def make_hybrid(config: str, **others: Any) -> nn.Module:
    """Return a model in training, with gates that let states live for many tokens."""
    torch.manual_seed(0)
    kind = getattr(transformers, config)
    model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES | HYBRIDS[config] | others))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.log(0.005 + 0.15 * torch.rand_like(p)))
            elif name.endswith("dt_bias"):
                p.copy_(torch.randn_like(p) - 1)
            elif p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    return model.train()  # type: ignore[no-any-return]


def make_separate(config: str, **others: Any) -> nn.Module:
    """Return the same model, which gets packed rows, and computes the logits of each document by itself."""
    model = make_hybrid(config, **others)

    class Separate(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            rows = zip(input_ids, position_ids, strict=True)
            logits = torch.stack([torch.cat([self._alone(ids) for ids in _documents(*row)], 1)[0] for row in rows])
            return CausalLMOutput(self.loss_function(logits, labels, self.config.get_text_config().vocab_size), logits)

        def _alone(self, ids: Tensor) -> Tensor:
            return super().forward(input_ids=ids[None]).logits

    model.__class__ = Separate
    return model


def _documents(ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(ids)]
    return ids.split([stop - start for start, stop in pairwise(starts)])
