"""Packed documents are refused for exactly those models in which one document changes the outputs of the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.families import VOCABULARY
from support.trainer_harness import make_trainer
from torch import Tensor, nn

from lightning_memo.data import DocumentsDataModule
from lightning_memo.data.separate_documents import refuse_mixed_documents
from lightning_memo.models import CausalLM

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
GDN = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "gpt_oss": EXPERTS,
    "falcon": {"alibi": False},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen3_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "mamba": {"state_size": 8},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8},
    "qwen3_next": EXPERTS | GDN | {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": MAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
}
SEPARATE = {"llama", "gemma2", "qwen3_moe", "llama4_text", "gpt2"}


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | MODELS[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def outputs_of_second_document(model: nn.Module, first: Tensor) -> Tensor:
    torch.manual_seed(1)
    second = torch.randint(1, 90, (1, 8))
    positions = torch.arange(8).repeat(2)[None]
    with torch.no_grad():
        return model(input_ids=torch.cat([first, second], 1), position_ids=positions).logits[:, 8:]


@pytest.mark.parametrize("family", MODELS)
def test_models_are_refused_if_documents_see_each_other(family: str) -> None:
    model = model_of(family)
    one, other = (outputs_of_second_document(model, torch.full((1, 8), token)) for token in (3, 70))
    assert torch.allclose(one, other, rtol=0, atol=1e-6) == (family in SEPARATE)
    if family in SEPARATE:
        refuse_mixed_documents(model)
    else:
        with pytest.raises(ValueError, match=r"packing=True puts several .* see each other: give packing=F"):
            refuse_mixed_documents(model)


def test_recurrent_layers_of_pytorch_are_refused() -> None:
    with pytest.raises(ValueError, match="and GRU passes information"):
        refuse_mixed_documents(nn.Sequential(nn.Embedding(8, 8), nn.GRU(8, 8)))


@pytest.mark.parametrize("packing", [True, False])
def test_fit_refuses_packed_rows_only(packing: bool, tmp_path: Path, own_folder: None) -> None:
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(3, 30)))
    data = DocumentsDataModule(str(file), seq_len=32, packing=packing)
    sizes = SIZES | {"vocab_size": 257, "model_type": "lfm2"} | MODELS["lfm2"]
    trainer = make_trainer("auto", max_steps=1, limit_val_batches=1)
    if not packing:
        trainer.fit(CausalLM({"config": sizes}), datamodule=data)
        assert trainer.global_step == 1
        return
    with pytest.raises(ValueError, match="give packing=False"):
        trainer.fit(CausalLM({"config": sizes}), datamodule=data)
