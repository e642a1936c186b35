"""Tensor and sequence parallelism give the losses and gradients of one process, family by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.families import VOCABULARY
from support.markers.slow import slow_if
from support.processes import run_in_processes
from support.tensor_parallel import Gradients, compare, errors, randomise, step, tensor_mesh, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface

from lightning_memo.parallel.tensor.shard_weights import TensorPlan, assign_styles, find_plan, shard_tensors

ATTENTION = "tests_causal"
BATCH, TOKENS = 2, 16
_COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_LLAMA = _COMMON | {"intermediate_size": 64, "num_key_value_heads": 4, "max_position_embeddings": 64}
_GQA = _LLAMA | {"num_key_value_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "llama_gqa": ("Llama", _GQA | {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("Llama", _GQA | {"tie_word_embeddings": True}),
    "llama_odd_vocabulary": ("Llama", _LLAMA | {"vocab_size": 97, "pad_token_id": 96}),
    "mixtral": ("Mixtral", _LLAMA | {"num_local_experts": 2}),
    "qwen2": ("Qwen2", _GQA),
    "qwen3": ("Qwen3", _GQA | {"head_dim": 8}),
    "mistral_window": ("Mistral", _GQA | {"sliding_window": 5}),
    "gemma": ("Gemma", _GQA | {"head_dim": 8}),
    "gemma2": ("Gemma2", _GQA | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", _GQA | {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2}),
    "phi3": ("Phi3", _LLAMA | _SPECIAL),
    "phi3_gqa": ("Phi3", _GQA | _SPECIAL),
    "granite": (
        "Granite",
        _GQA | {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "gpt_neox": ("GPTNeoX", _COMMON | {"intermediate_size": 64, "use_parallel_residual": True}),
    "gpt_neox_serial": ("GPTNeoX", _COMMON | {"intermediate_size": 64, "use_parallel_residual": False}),
    "glm": ("Glm", _GQA | {"head_dim": 8} | _SPECIAL),
    "cohere": ("Cohere", _GQA | {"logit_scale": 0.25}),
    "starcoder2": ("Starcoder2", _GQA | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "olmo2": ("Olmo2", _GQA),
    "phi": ("Phi", _LLAMA | {"resid_pdrop": 0.0}),
    "phi_qk_norm": ("Phi", _LLAMA | {"resid_pdrop": 0.0, "qk_layernorm": True}),
    "apertus": ("Apertus", _GQA),
}
# Those that are like another one to the divided modules.
ALIKE = (
    "qwen2", "qwen3", "mistral_window", "gemma", "gemma3", "phi3", "granite", "gpt_neox_serial", "cohere", "starcoder2",
    "phi", "llama", "olmo2", "glm", "llama_tied",
)  # fmt: skip
# What a model's own plan leaves open: an activation function with parameters.
PLANS = {"apertus": {"layers.*.mlp.act_fn": "replicated"}}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention that needs no mask: under sequence parallelism a model would build one for its own tokens."""
    assert attention_mask is None
    assert type(query) is Tensor and type(key) is Tensor and type(value) is Tensor
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    seen = (j <= i) if sliding_window is None else (j <= i) & (j > i - sliding_window)
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def build(family: str, attention: str = ATTENTION) -> nn.Module:
    """A model of a family whose parameters are all random, biases and norms too."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return randomise(model)


def make_batch(vocabulary: int = VOCABULARY, seed: int = 3) -> dict[str, Tensor]:
    """All tokens, with shifted labels, some of which are ignored."""
    ids = torch.randint(0, vocabulary, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))
    ids[0, 0], ids[1, 3] = vocabulary - 1, 0  # on different ranks; some families pad with one of them
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    labels[0, : TOKENS // 2] = -100
    return {
        "input_ids": ids, "position_ids": torch.arange(TOKENS)[None], "labels": labels, "shift_labels": labels,
        "num_items_in_batch": (labels != -100).sum(),
    }  # fmt: skip


def compare_family(family: str) -> dict[bool, float]:
    batch = make_batch(FAMILIES[family][1]["vocab_size"])
    return {sp: compare(partial(build, family), batch, sp, PLANS.get(family)) for sp in (False, True)}


@slow_if(lambda family: family in ALIKE)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family: str) -> None:
    for worst in run_in_processes(2, compare_family, family):
        assert max(worst.values()) <= 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3", "phi_qk_norm", "olmo2", "llama_odd_vocabulary"])
def test_four_ranks(family: str) -> None:
    for worst in run_in_processes(4, compare_family, family):
        assert max(worst.values()) <= 1e-5, worst


# ---- models without a Hugging Face plan


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        # Without rotary positions the gradient of a bias of keys is zero but for rounding.
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=bias) for bias in (True, False, True))
        self.q_norm = nn.LayerNorm(8)
        self.out = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class OpenLayer(Attention):
    """A layer without a module of its own around the projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.norm(x))


class Plain(nn.Module):
    """A model with learned positions."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(TOKENS, 32)
        self.blocks = nn.ModuleList(layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, **rest: Any) -> Any:
        x = self.embed(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


PLAN = {
    "embed": "rowwise", "head": "colwise_gather_output", "attention.q": "colwise", "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise", "blocks.*.attention.out.0": "rowwise", "blocks.*.mlp.0": "colwise",
    "blocks.1.mlp.2": "rowwise", "blocks.0.mlp.2": "rowwise",
}  # fmt: skip
OPEN_PLAN = {
    "q": "colwise", "k": "colwise", "v": "colwise", "out.0": "rowwise", "q_norm": "replicated_with_grad_allreduce",
}  # fmt: skip


def _plain(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return randomise(Plain(layer))


def compare_plain() -> list[float]:
    batch, layered = make_batch(), partial(_plain, Layer)
    found = [compare(layered, batch, sp, PLAN) for sp in (False, True)]
    whole_ends = {name: style for name, style in PLAN.items() if name not in ("embed", "head")}
    found.append(compare(layered, batch, False, whole_ends))
    return [*found, compare(partial(_plain, OpenLayer), batch, False, OPEN_PLAN)]


@pytest.mark.slow
def test_plain_models() -> None:
    for found in run_in_processes(2, compare_plain):
        assert max(found) <= 1e-5, found


# ---- adapters

LORA = {
    "llama_gqa": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "llama": ["k_proj", "down_proj", "lm_head"],
    "phi3_gqa": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "olmo2": ["q_proj", "o_proj"],
}


def _with_lora(family: str, **settings: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=LORA[family], init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    return get_peft_model(build(family), config).train()


def compare_lora() -> dict[str, float]:
    batch, found = make_batch(), {}
    for family in LORA:
        for sp in (False, True):
            found[f"{family} {sp}"] = compare(partial(_with_lora, family), batch, sp)
    saved = partial(_with_lora, "llama_gqa", modules_to_save=["lm_head"])
    return found | {"modules_to_save": compare(saved, batch, True)}


@pytest.mark.slow
def test_lora() -> None:
    pytest.importorskip("peft")
    for found in run_in_processes(2, compare_lora):
        assert max(found.values()) <= 1e-5, found


# ---- with data parallelism


class Holder(nn.Module):
    """Stands for a LightningModule: the model is somewhere inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


def train_sharded(family: str, data: int, sp: bool, reshard: bool) -> tuple[float, float]:
    """Errors of gradients, and of the weights after a step of AdamW, with FSDP2 on top."""
    mesh = tensor_mesh(2, data)
    batches = [make_batch(seed=seed) for seed in range(data)]
    plain, model = Holder(build(family)), Holder(build(family))
    shard_tensors(model, mesh["tensor_parallel"], sp)
    for unit in (*model.model.base_model.layers, model):
        fully_shard(unit, mesh=mesh["data_parallel"], reshard_after_forward=reshard)
    weights, gradients = [], []
    mine = batches[mesh["data_parallel"].get_local_rank()]
    for m, given in ((plain, batches), (model, [mine])):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3, foreach=True)
        for batch in given:
            (m(**batch).loss / len(given)).backward()
        gradients.append({n: whole(p.grad) for n, p in m.named_parameters()})
        nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=True)
        optimizer.step()
        weights.append({n: whole(p) for n, p in m.named_parameters()})
    return max(errors(gradients[1], gradients[0]).values()), max(errors(weights[1], weights[0]).values())


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_fsdp(data: int) -> None:
    for family, sp, reshard in (("llama_tied", True, True), ("qwen3", False, False), ("phi3_gqa", True, True)):
        for found in run_in_processes(2 * data, train_sharded, family, data, sp, reshard):
            assert max(found) <= 1e-5, (family, sp, reshard, found)


def accumulate(sp: bool) -> float:
    """Gradients add up over micro-batches, each of which is resolved."""
    batches = [make_batch(seed=seed) for seed in range(3)]
    found: list[Gradients] = []
    for model in (build("qwen3"), build("qwen3")):
        if found:
            shard_tensors(model, tensor_mesh(2)["tensor_parallel"], sp)
        for batch in batches:
            _, gradients = step(model, batch)
        found.append(gradients)
    return max(errors(found[1], found[0]).values())


@pytest.mark.parametrize("sp", [False, True])
def test_accumulation(sp: bool) -> None:
    assert max(run_in_processes(2, accumulate, sp)) <= 1e-5


# ---- what is sent


class Collectives(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def count_per_layer(family: str, sp: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of one layer's forward and backward: those of a model with one layer more, less the others."""
    found = []
    for layers in (2, 3):
        name, settings = FAMILIES[family]
        config = getattr(transformers, f"{name}Config")(**settings | {"num_hidden_layers": layers}, use_cache=False)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        shard_tensors(model, tensor_mesh(2)["tensor_parallel"], sp)
        with Collectives() as forward:
            loss = model(**make_batch()).loss
        with Collectives() as backward:
            loss.backward()
        found.append((forward.counts, backward.counts))
    (forward, backward), (more_forward, more_backward) = found
    return _difference(more_forward, forward), _difference(more_backward, backward)


def _difference(more: dict[str, int], less: dict[str, int]) -> dict[str, int]:
    return {name: count - less.get(name, 0) for name, count in more.items() if count > less.get(name, 0)}


ALL_REDUCES = {"all_reduce": 2}
GATHERS = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


@pytest.mark.parametrize(
    ("family", "sp", "forward", "backward"),
    [
        ("llama", False, ALL_REDUCES, ALL_REDUCES),
        ("llama", True, GATHERS, GATHERS),
        # Packed projections fetch their rows in forward, again in backward, and give the rows' gradients back.
        ("phi3", False, ALL_REDUCES | {"alltoall_base_": 2}, ALL_REDUCES | {"alltoall_base_": 4}),
    ],
)
def test_collectives_per_layer(family: str, sp: bool, forward: dict[str, int], backward: dict[str, int]) -> None:
    for found in run_in_processes(2, count_per_layer, family, sp):
        assert found == (forward, backward)


# ---- autocast, and attention as transformers runs it


def compare_autocast() -> dict[str, float]:
    found = {}
    for family in ("phi3_gqa", "llama_gqa"):
        gradients = []
        for split in (False, True):
            model = build(family)
            if split:
                shard_tensors(model, tensor_mesh(2)["tensor_parallel"], True)
            with torch.autocast("cpu", torch.bfloat16):
                gradients.append(step(model, make_batch())[1])
        found[family] = max(errors(gradients[1], gradients[0]).values())
    return found


def test_autocast() -> None:
    # bf16 keeps 8 bits, and sums over two ranks round otherwise than one.
    for found in run_in_processes(2, compare_autocast):
        assert max(found.values()) <= 0.05, found


def compare_sdpa() -> float:
    return compare(partial(build, "llama_gqa", "sdpa"), make_batch(), False)


def test_sdpa() -> None:
    assert max(run_in_processes(2, compare_sdpa)) <= 1e-5


# ---- what cannot be split


@pytest.mark.parametrize(
    ("family", "ranks", "message"),
    [
        ("llama", 3, "tensor_parallel_size=3 does not divide num_attention_heads=4 of Llama.*: it can be 1, 2, 4; for"),
        ("llama_gqa", 4, "does not divide num_key_value_heads=2 of LlamaForCausalLM: it can be 1, 2; for more GPUs"),
        ("olmo2", 3, "does not divide intermediate_size=64 of Olmo2ForCausalLM"),
        ("phi3_gqa", 4, "does not divide num_key_value_heads=2 of Phi3ForCausalLM: it can be 1, 2;"),
        ("mixtral", 4, "does not divide num_experts of model.layers.0.mlp.experts=2 of MixtralForCausalLM: it can be"),
        ("gpt_neox", 3, "does not divide num_attention_heads=4 of GPTNeoXForCausalLM: it can be 1, 2, 4;"),
    ],
)  # fmt: skip
def test_sizes(family: str, ranks: int, message: str) -> None:
    model = build(family)
    find_plan(model, 2)
    with pytest.raises(ValueError, match=message):
        find_plan(model, ranks)


def _llama4() -> nn.Module:
    config = transformers.Llama4TextConfig(**_GQA, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=32)
    return transformers.AutoModelForCausalLM.from_config(config)


def _gpt2() -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4))


def _cohere_with_norms() -> nn.Module:
    config = transformers.CohereConfig(**_GQA, use_qk_norm=True)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (partial(_plain, Layer), PLAN | {"mlp": "moe_tp_experts"}, r"the experts \(blocks.0.mlp\) do not have stacked"),
        (_llama4, None, r"the experts \(.*feed_forward.experts\) do not .* get hidden states, choices and their weig"),
        (_gpt2, None, "GPT2LMHeadModel has no tp_plan that says how the weights of its layers are split: train with"),
        (_gpt2, {"c_attn": "colwise"}, "splits 0 layers of transformer.h.0.attn row-wise"),
        (partial(_plain, Layer), None, "Plain has no tp_plan"),
        (partial(_plain, Layer), {"attention.q": "columns"}, 'style "columns" of blocks.0.attention.q is not known'),
        (partial(_plain, Layer), PLAN | {"mlp.7": "colwise"}, '"mlp.7" names no module: names are like "blocks.0.att'),
        (partial(_plain, Layer), PLAN | {"blocks.*.attention.out.0": "colwise"}, "0 layers of blocks.0.attention row"),
        (partial(_plain, OpenLayer), OPEN_PLAN, "sequence_parallel=True: blocks.0.q is not inside an attention"),
        (partial(_plain, Layer), {"mlp.0": "colwise", "mlp.2": "rowwise"}, "does not split blocks.0.attention.q, whi"),
        (partial(build, "apertus"), None, "splits model.layers.0.mlp and does not name model.layers.0.mlp.act_fn"),
        (_cohere_with_norms, None, "splits model.layers.0.self_attn and does not name model.layers.0.self_attn.q_norm"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_followed(
    model: Callable[[], nn.Module], plan: Mapping[str, str] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assign_styles(TensorPlan(model(), plan), sequence_parallel=True)


def split_something_else() -> None:
    """A projection that is fed something else than its block's input."""
    model = _plain(Layer)
    shard_tensors(model, tensor_mesh(2)["tensor_parallel"], False, PLAN)
    attention = model.blocks[0].attention
    with pytest.raises(ValueError, match=r"cannot split .* its input is not the input of the module that contains"):
        attention.q(torch.zeros(1, 4, 32))


def test_input_of_a_block() -> None:
    run_in_processes(2, split_something_else)


def tie_differently() -> None:
    model = _plain(Layer)
    model.positions.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"positions.weight and embed.weight are one parameter, but the plan splits"):
        shard_tensors(model, tensor_mesh(2)["tensor_parallel"], False, PLAN)


def test_ties() -> None:
    run_in_processes(2, tie_differently)
