"""Models that relate tokens in ways that are not divided train in several processes as in one.

Modules, or whole layers, get the tokens of all processes; or only the layers are divided. The numbers of tokens are not
multiples of what processes share, so that rows are padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support import parallel_training
from support.attention import attention_models
from support.attention.recorded_training import Recording
from support.divided_training import RING, ULYSSES, check, train
from support.families import VOCABULARY, make_batch
from support.harness import Batch
from support.processes import ProcessError, run_in_processes
from support.trainer_harness import batches, make_trainer
from torch import nn

from lightning_memo import MemoStrategy

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}


def jamba() -> nn.Module:
    """Return a model with recurrences without a state argument, and layers of attention."""
    config = transformers.JambaConfig(
        **_SIZES, intermediate_size=64, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
        mamba_d_state=4, mamba_dt_rank=4,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def glm_moe_dsa() -> nn.Module:
    """Return a model that selects the keys of each query."""
    config = transformers.GlmMoeDsaConfig(
        **_SIZES, intermediate_size=64, moe_intermediate_size=32, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, index_topk=8, index_head_dim=16, index_n_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def camembert_decoder() -> nn.Module:
    """Return a model that counts positions itself, with weights for which attention is not nearly uniform.

    Biases of keys are frozen, because their gradients are rounding errors.
    """
    model = attention_models.camembert_decoder()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith("key.bias"))
        if name.endswith(("query.weight", "key.weight", "value.weight")):
            p.data.mul_(20)
    return model


def whisper_decoder() -> nn.Module:
    """Return a model that takes no labels of some tokens."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=64, dropout=0.0,
        max_target_positions=96, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.WhisperForCausalLM(config)


def xlnet() -> nn.Module:
    """Return a model whose layers take tokens before rows."""
    config = transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=3, n_head=4, d_inner=64, dropout=0.0)
    return transformers.XLNetLMHeadModel(config)


def rows(seed: int) -> Batch:
    return make_batch(2, 45, seed=seed)


def packed(seed: int) -> Batch:
    positions = torch.cat([torch.arange(17 + 5 * seed), torch.arange(28 - 5 * seed)])
    return {**rows(seed), "position_ids": positions.expand(2, -1).clone()}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "recurrences": jamba,
    "a mean over tokens": parallel_training.MODELS["llama_mixing"],
    "selected keys": glm_moe_dsa,
    "position biases": attention_models.bloom,
    "counted positions": camembert_decoder,
    "labels of all tokens": whisper_decoder,
}


@pytest.mark.parametrize("context", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, context: dict[str, Any]) -> None:
    check(MODELS[name], [rows(seed) for seed in range(2)], {**context, "alpha": 0.5})


@pytest.mark.parametrize("name", ["recurrences", "position biases"])
def test_a_ring_of_groups_that_exchange_heads(name: str) -> None:
    settings = {"context_parallel_size": 4, "ulysses_size": 2, "alpha": 0.0, "zero_stage": 3}
    check(MODELS[name], [rows(seed) for seed in range(2)], settings, processes=4)


def test_position_biases_with_as_many_heads_of_rows_as_tokens_of_a_process() -> None:
    check(attention_models.bloom, [make_batch(4, 32, seed=0)], {**RING, "alpha": 0.5})


def test_data_parallel_processes() -> None:
    """Each pair of processes computes whole rows outside of the layers, and counts its labels once."""
    settings = {"context_parallel_size": 2, "alpha": 0.0}
    check(camembert_decoder, [rows(0)] * 2, settings, processes=4)


def dropping() -> nn.Module:
    """Return a model whose gathered modules draw random numbers."""
    return transformers.AutoModelForCausalLM.from_config(
        transformers.GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]],
            attention_dropout=0.1, resid_dropout=0.0, embed_dropout=0.0,
        )
    )  # fmt: skip


REFUSED = {
    "random numbers": (dropping, rows, {}, "draws random numbers, which differ between them"),
    "tokens before rows": (xlnet, rows, {}, "it is not known where its tokens are"),
    "packed rows": (attention_models.bloom, packed, {}, "only the layers of this model are divided"),
    "slices on the host": (
        jamba, rows, {"slice_tokens": 8, "stream_from_host": "hidden"},
        "JambaMambaDecoderLayer needs the tokens of all processes at once",
    ),
    "masks, slices on the host": (
        glm_moe_dsa, rows, {"slice_tokens": 8, "stream_from_host": "hidden"}, "makes attention masks of all tokens"
    ),
    "positions, slices on the host": (
        attention_models.bloom, rows, {"slice_tokens": 8, "stream_from_host": "hidden"}, "takes no position_ids"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "batch", "settings", "why"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(
    build: Callable[[], nn.Module], batch: Callable[[int], Batch], settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ProcessError, match=f"ValueError: .*{why}.*\n"):
        run_in_processes(2, train, build, [batch(0)], 2, 1, RING | settings)


class Validated(Recording):
    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("loss", self.model(**batch).loss)


def validation_loss(build: Callable[[], nn.Module], settings: dict[str, Any], processes: int) -> float:
    strategy = MemoStrategy(**settings) if settings else "auto"
    trainer = make_trainer(strategy, devices=processes, use_distributed_sampler=False)
    return float(trainer.validate(Validated(build), batches([rows(0)]), verbose=False)[0]["loss"])


@pytest.mark.parametrize("name", ["selected keys", "position biases", "labels of all tokens"])
def test_evaluation(name: str) -> None:
    expected = validation_loss(MODELS[name], {}, 1)
    parts = run_in_processes(2, validation_loss, MODELS[name], RING, 2)
    assert sum(parts) / 2 == pytest.approx(expected, rel=1e-6)
