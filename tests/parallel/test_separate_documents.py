"""Packed documents are refused for exactly those models in which one document changes the outputs of the next.

States of recurrences begin anew in each document where the engine can let them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.families import VOCABULARY
from support.trainer_harness import make_trainer
from torch import Tensor, nn

from lightning_memo.data import DocumentsDataModule
from lightning_memo.engine.modules.packed_rows import attach_documents
from lightning_memo.models import CausalLM
from lightning_memo.parallel.batches.packed_documents import find_mixed_documents, separate_documents
from lightning_memo.parallel.batches.token_layout import CurrentLayout

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
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 64, "attention_chunk_size": 12},
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
POSITIONS = torch.arange(8).repeat(2)[None]
RESET = {"falcon_h1", "qwen3_next", "lfm2"}
RECURRENT = RESET | {"mamba", "jamba", "minimax", "recurrent_gemma"}
SEPARATE = {"llama", "gemma2", "qwen3_moe", "llama4_text", "gpt2"}
if Version(transformers.__version__) >= Version("5.24"):  # its attention takes the positions since then
    SEPARATE.add("falcon")


def model_of(family: str, use_cache: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | MODELS[family] | {"use_cache": use_cache})
    return transformers.AutoModelForCausalLM.from_config(config)


def outputs_of_second_document(model: nn.Module, first: Tensor, **arguments: Any) -> Tensor:
    torch.manual_seed(1)
    second = torch.randint(1, 90, (1, 8))
    with torch.no_grad():
        return model(input_ids=torch.cat([first, second], 1), position_ids=POSITIONS, **arguments).logits[:, 8:]


def are_separate(model: nn.Module, **arguments: Any) -> bool:
    one, other = (outputs_of_second_document(model, torch.full((1, 8), token), **arguments) for token in (3, 70))
    return torch.allclose(one, other, rtol=0, atol=1e-6)


@contextlib.contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    undo = attach_documents(model, CurrentLayout())
    yield
    for each in undo:
        each()


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_models_are_refused_if_documents_see_each_other(family: str, use_cache: bool) -> None:
    model = model_of(family, use_cache).eval()
    separate = family in SEPARATE and not use_cache
    resets = family in RESET and not use_cache
    assert are_separate(model) == separate
    assert (find_mixed_documents(model, resets_states=False) is None) == separate
    assert (find_mixed_documents(model) is None) == (separate or resets)
    refused = pytest.raises(ValueError, match="position_ids tell that rows hold several documents, and ")
    if separate or resets:
        assert separate_documents(model, {"position_ids": POSITIONS}, 2) == ((0, 8), (0, 8))
    else:
        with refused:
            separate_documents(model, {"position_ids": POSITIONS}, 2)
    with attached(model), refused if family in RECURRENT and not resets else contextlib.nullcontext():
        assert are_separate(model) == (separate or resets)
    assert are_separate(model) == separate


def test_a_cache_by_configuration_or_by_call() -> None:
    caching, other = model_of("llama", True).eval(), model_of("llama", False).eval()
    assert not are_separate(caching) and are_separate(caching, use_cache=False)
    assert find_mixed_documents(caching, makes_cache=False) is None
    assert find_mixed_documents(other, makes_cache=True) == find_mixed_documents(caching)
    with pytest.raises(ValueError, match=r"LlamaModel makes a key-value .*: set model\.config\.use_cache = False, or "):
        separate_documents(caching, {"position_ids": POSITIONS}, 1)


def test_rows_that_are_not_packed_are_never_refused() -> None:
    model = model_of("llama", True)
    for batch in (
        {},
        {"position_ids": POSITIONS[:, :8]},
        {"position_ids": POSITIONS, "attention_mask": POSITIONS > -1},
    ):
        assert separate_documents(model, batch, 1) is None


def test_recurrent_layers_of_pytorch_are_refused() -> None:
    mixed = find_mixed_documents(nn.Sequential(nn.Embedding(8, 8), nn.GRU(8, 8)))
    assert mixed is not None and mixed.why.startswith("GRU passes information")


@pytest.mark.parametrize(("strategy", "packing"), [("auto", True), ("auto", False), ("memo", True)])
def test_fit_refuses_packed_rows_only(strategy: str, packing: bool, tmp_path: Path, own_folder: None) -> None:
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(3, 30)))
    data = DocumentsDataModule(str(file), seq_len=32, packing=packing)
    sizes = SIZES | {"vocab_size": 257, "model_type": "lfm2"} | MODELS["lfm2"]
    trainer = make_trainer(strategy, max_steps=1, limit_val_batches=1)
    if strategy == "memo" or not packing:
        trainer.fit(CausalLM({"config": sizes}), datamodule=data)
        assert trainer.global_step == 1
        return
    with pytest.raises(ValueError, match="give packing=False"):
        trainer.fit(CausalLM({"config": sizes}), datamodule=data)
