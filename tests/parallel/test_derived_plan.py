"""Models without a plan that can be followed are divided as runs of their layers prove, and train as whole ones.

The bound is 1e-5, relative, in fp32, for the loss and the gradient of each parameter. Biases of keys have no gradient
but for rounding: gradients below a thousandth of the norm of all count as large as this.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.devices import skip_ring_on_cuda
from support.families import VOCABULARY
from support.markers.slow import slow_if
from support.parallel_training import Run, train_alone, train_together
from support.processes import run_in_processes
from support.samples.configurations import BOUND
from support.tensor_parallel import compare, randomise
from torch import Tensor, nn

from lightning_memo.parallel.tensor.derived_regions import Region, derive_regions
from lightning_memo.parallel.tensor.sample_runs import LayerCall
from lightning_memo.parallel.tensor.shard_weights import assign_styles, find_plan

LEAST = 1e-3
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.0,
}  # fmt: skip
_GQA = _COMMON | {"num_key_value_heads": 2, "head_dim": 8}
_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A family of models.

    Attributes:
        config: Name of its configuration.
        settings: Sizes.
        whole: Linear layers that stay whole although no other one needs them so.
    """

    config: str
    settings: dict[str, Any]
    whole: tuple[str, ...] = ()


EXAMPLES = {
    # Weights [inputs, outputs], of which one has three parts; attributes for the number of heads and of features.
    "gpt2": Example("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
                             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "vocab_size": VOCABULARY}),
    # The row-wise layers are outside of the modules with the column-wise ones, and a bias belongs to two modules.
    "bert": Example("Bert", _COMMON | {"is_decoder": True, "hidden_dropout_prob": 0.0,
                                       "attention_probs_dropout_prob": 0.0}),
    # The MLP is no module of its own.
    "opt": Example("OPT", {**_COMMON, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    # Position biases have all heads. The packed MLP is divided.
    "bloom": Example("Bloom", {**_COMMON, "n_head": 4, "n_layer": 2},
                     ("transformer.h.*.self_attention.query_key_value", "transformer.h.*.self_attention.dense")),
    # Queries, keys and values are packed by groups, and modules write into sums.
    "falcon": Example("Falcon", {**_COMMON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    # Two parts of an MLP are packed.
    "modernbert": Example("ModernBertDecoder", {**_COMMON, "local_attention": 8, "cls_token_id": 1,
                                                "sep_token_id": 2}),
    # A parameter for each head, and a plan with a style that is not known.
    "granite_swa": Example("GraniteSWA", _GQA),
    # Latent attention beside experts.
    "deepseek_v2": Example("DeepseekV2", {**_COMMON, "num_key_value_heads": 4, **_MLA, **_MOE}),
    # Sparse attention whose tokens a module with linear layers of its own chooses.
    "glm_moe_dsa": Example("GlmMoeDsa", {**_COMMON, "num_key_value_heads": 4, **_MLA, **_MOE, "index_n_heads": 2,
                                         "index_head_dim": 16, "index_topk": 4}),
    # Layers of two kinds, with experts.
    "qwen3_next": Example("Qwen3Next", {**_GQA, **_DELTA, "num_experts": 4, "num_experts_per_tok": 2,
                                        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
                          ("model.layers.*.linear_attn.in_proj_qkvz", "model.layers.*.linear_attn.in_proj_ba",
                           "model.layers.*.linear_attn.out_proj", "model.layers.*.mlp.shared_expert_gate")),
    # Experts in the layer itself. The last layers attend to keys of earlier ones, whose attention is whole for that.
    "gemma4": Example("Gemma4Text", {**_GQA, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16,
                                     "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
                                     "hidden_size_per_layer_input": 8, "enable_moe_block": True, "num_experts": 4,
                                     "top_k_experts": 2, "moe_intermediate_size": 32,
                                     "vocab_size_per_layer_input": VOCABULARY},
                      (*(f"model.layers.*.self_attn.{name}_proj" for name in "qkvo"),
                       "model.layers.*.per_layer_input_gate", "model.layers.*.per_layer_projection",
                       "model.layers.*.router.proj")),
}  # fmt: skip


def build(family: str) -> nn.Module:
    """A model of a family whose parameters are all random."""
    example = EXAMPLES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{example.config}Config")(**example.settings, use_cache=False)
    return randomise(transformers.AutoModelForCausalLM.from_config(config))


def make_batch() -> dict[str, Tensor]:
    """Ids, and labels of which some are ignored."""
    ids = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :8] = -100
    return {"input_ids": ids, "labels": labels}


def compare_family(family: str) -> float:
    return compare(partial(build, family), make_batch(), sp=False, least=LEAST)


@slow_if(lambda family: family in ("opt", "modernbert", "granite_swa", "bloom"))
@pytest.mark.parametrize("family", EXAMPLES)
def test_loss_and_gradients(family: str) -> None:
    assert max(run_in_processes(2, compare_family, family)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "bert", "deepseek_v2"])
def test_four_ranks(family: str) -> None:
    assert max(run_in_processes(4, compare_family, family)) <= 1e-5


def _fsmt() -> nn.Module:
    """A model that names a table with the weight of its head in place of the head."""
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder")
             for name, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()}  # fmt: skip
    vocabularies = {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
    config = transformers.FSMTConfig(**vocabularies, **sizes, d_model=32, dropout=0.0, attention_dropout=0.0)
    config.use_cache = False
    return randomise(transformers.FSMTForConditionalGeneration(config))


def compare_fsmt() -> float:
    return compare(_fsmt, make_batch(), sp=False, least=LEAST)


def test_a_table_in_place_of_the_head() -> None:
    assert max(run_in_processes(2, compare_fsmt)) <= 1e-5


def test_several_tokens_with_one_meaning() -> None:
    model = build("gpt2")
    model.config.eos_token_id = [1, 2]
    assert find_plan(model, 2).derived == find_plan(build("gpt2"), 2).derived


@pytest.mark.parametrize("family", EXAMPLES)
def test_what_stays_whole(family: str) -> None:
    derived = find_plan(build(family), 2).derived
    assert derived is not None
    assert derived.whole == EXAMPLES[family].whole


# ---- adapters

LORA = {"gpt2": ["c_attn", "c_proj", "c_fc"], "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}


def _with_lora(family: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=LORA[family], init_lora_weights=False, fan_in_fan_out=family == "gpt2")
    return get_peft_model(build(family), config).train()


def compare_lora(family: str) -> float:
    return compare(partial(_with_lora, family), make_batch(), sp=False, least=LEAST)


@slow_if(lambda family: family == "gpt2")
@pytest.mark.parametrize("family", LORA)
def test_lora(family: str) -> None:
    pytest.importorskip("peft")
    assert max(run_in_processes(2, compare_lora, family)) <= 1e-5


# ---- training


CONFIGURATIONS = {
    "tp2": (2, {}),
    "cp2 x tp2": (4, {"context_parallel_size": 2}),
    "dp2 x tp2 zero3": (4, {"zero_stage": 3}),
    "pp2 x tp2": (4, {"pipeline_parallel_size": 2}),
}


@slow_if(lambda configuration: configuration != "tp2")
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_training(configuration: str) -> None:
    run = Run(family="gpt2", steps=2, layers=4)
    size, others = CONFIGURATIONS[configuration]
    skip_ring_on_cuda(others)
    settings = {"tensor_parallel_size": 2, "sequence_parallel": False, "alpha": 0.5, **others}
    errors = train_together(size, run, settings).worst_error(train_alone(run))
    # Biases of keys have only rounding for a gradient, of which Adam makes steps.
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors


# ---- single layers


class Attention(nn.Module):
    """Attention of 4 heads of 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.qkv(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.change(attended.transpose(1, 2).flatten(2)))

    def heads(self, packed: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (self.num_heads, 8)).transpose(1, 2) for t in packed.chunk(3, -1)]

    def change(self, x: Tensor) -> Tensor:
        return x


class Interleaved(Attention):
    """The rows of a head are neighbours."""

    def heads(self, packed: Tensor) -> list[Tensor]:
        return [t.transpose(1, 2) for t in packed.unflatten(-1, (self.num_heads, 3, 8)).unbind(-2)]


class NormOfAllHeads(Attention):
    """The heads of other ranks are in the norm."""

    def change(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])


class WithResidual(Attention):
    """The sum of the ranks is not all that leaves, and the input reaches it on another way."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class NormOfSum(Attention):
    """A weight inside of the block is applied to the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Leaking(Attention):
    """Another result is a part of what a rank has."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.qkv(x).square().mean()


class Sharing(Attention):
    """Other layers get the heads that a rank has."""

    def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Any:
        self.shared = shared
        return super().forward(x)

    def heads(self, packed: Tensor) -> list[Tensor]:
        self.shared["keys"] = super().heads(packed)[1]
        return super().heads(packed)


class Layer(nn.Module):
    """A layer without an MLP."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.attention = attention()

    def forward(self, x: Tensor, **others: Any) -> Any:
        result = self.attention(x * self.scale, **others)
        return (x + result[0], result[1]) if isinstance(result, tuple) else x + result


def regions_of(attention: Callable[[], nn.Module], ranks: int = 2, **others: Any) -> list[Region]:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32, requires_grad=True)
    return derive_regions(LayerCall(Layer(attention), (x,), others), ranks)


@pytest.mark.parametrize(
    ("attention", "parts"), [(Attention, (32, 32, 32)), (Interleaved, (96,)), (NormOfSum, (32, 32, 32))]
)
def test_parts_of_packed_weights(attention: Callable[[], nn.Module], parts: tuple[int, ...]) -> None:
    (region,) = regions_of(attention)
    assert dict(region.colwise) == {"attention.qkv": parts}
    assert (region.block, region.rowwise) == ("attention", "attention.out")
    assert region.shares.attributes == ("num_heads",)


def test_weights_beyond_the_sum() -> None:
    (region,) = regions_of(NormOfSum)
    assert set(region.beyond) == {"attention.norm.weight", "attention.norm.bias"}


@pytest.mark.parametrize("attention", [NormOfAllHeads, WithResidual, Leaking])
def test_divisions_that_are_wrong(attention: Callable[[], nn.Module]) -> None:
    assert not regions_of(attention)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_what_other_layers_get(kind: type) -> None:
    assert not regions_of(Sharing, shared=kind())


def test_numbers_of_ranks() -> None:
    assert regions_of(Attention, ranks=4)
    assert not regions_of(Attention, ranks=3)


# ---- what cannot be divided


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY)
    return transformers.AutoModelForCausalLM.from_config(config)


def _big_bird() -> nn.Module:
    config = transformers.BigBirdConfig(**_COMMON, is_decoder=True)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_mamba, "MambaForCausalLM has no tp_plan .* not be derived either: no division of its layers gives what they"),
        (_big_bird, "not be derived either: a trial run with token ids alone fails .the model replaces modules while"),
    ],
)
def test_refusals(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_plan(model(), 2)


def test_sequence_parallelism() -> None:
    plan = find_plan(build("gpt2"), 2)
    with pytest.raises(
        ValueError, match=r"sequence_parallel=True: how GPT2LMHeadModel is divided was derived from its"
    ):
        assign_styles(plan, sequence_parallel=True)
