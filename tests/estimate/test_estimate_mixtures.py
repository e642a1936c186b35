"""Mixtures of experts: shapes, what layers save, weights of a process, and what expert parallelism sends."""

from __future__ import annotations

import json
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.devices import FUSED
from support.harness import EngineUnderTest
from support.markers.slow import slow_if
from support.modes import BY_ALPHA, BY_KIND
from support.trainer_harness import LanguageModel, batches, make_trainer

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.plan import Plan
from lightning_memo.estimate import (
    EstimateRequest,
    Parallelism,
    constants_of,
    estimate,
    load_cluster,
    load_model,
    search,
)
from lightning_memo.estimate.command import main
from lightning_memo.estimate.device_bytes import (
    device_parameters,
    device_state_bytes,
    gathered_bytes,
    layer_weights,
    received_tokens,
)
from lightning_memo.estimate.parallelism_search import step_parts
from lightning_memo.estimate.planner_inputs import estimated_layer_costs, recomputed_products
from lightning_memo.estimate.saved_tensors import Precision, bytes_of, saved_tensors
from lightning_memo.estimate.step_times import layer_times
from lightning_memo.runtime import solve_plan
from lightning_memo.shapes.hf_config import shape_of
from lightning_memo.shapes.model_shape import ModelShape

SETTINGS: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 2048, "use_cache": False, "intermediate_size": 40, "num_experts_per_tok": 3,
}  # fmt: skip
ROUTED: dict[str, Any] = SETTINGS | {
    "intermediate_size": 176, "moe_intermediate_size": 40, "n_routed_experts": 10, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
QWEN = SETTINGS | {"intermediate_size": 176, "moe_intermediate_size": 40, "num_experts": 10}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", QWEN | {"head_dim": 24}),
    "qwen3_moe_normalized": ("qwen3_moe", QWEN | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3_moe_with_dense": ("qwen3_moe", QWEN | {"head_dim": 24, "decoder_sparse_step": 2}),
    "qwen2_moe": ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", SETTINGS | {"num_local_experts": 10}),
    "granitemoe": ("granitemoe", SETTINGS | {"num_local_experts": 10}),
    "gpt_oss": ("gpt_oss", SETTINGS | {"num_local_experts": 10, "head_dim": 24, "sliding_window": 32}),
    "glm4_moe": ("glm4_moe", ROUTED | {"head_dim": 24}),
    "glm4_moe_with_norms": ("glm4_moe", ROUTED | {"head_dim": 24, "use_qk_norm": True}),
    "deepseek_v3": ("deepseek_v3", ROUTED | LATENT | {"q_lora_rank": 32}),
    "deepseek_v3_one_query": ("deepseek_v3", ROUTED | LATENT | {"q_lora_rank": None}),
}
OFTEN = ("qwen3_moe_normalized", "mixtral", "granitemoe", "gpt_oss", "deepseek_v3")
RING = Parallelism(cp=8, zero_stage=3)


def configured(case: str, **changes: Any) -> tuple[transformers.PreTrainedConfig, ModelShape]:
    model_type, settings = CASES[case]
    config = transformers.AutoConfig.for_model(model_type, **settings | changes)
    return config, shape_of(config.to_dict(), case)


def ask(**changes: Any) -> EstimateRequest:
    request = EstimateRequest(
        shape=load_model("qwen3_30b_a3b"), cluster=load_cluster("h100"), constants=constants_of("h100"),
        method="memo", gpus=8, seq_len=2**20, batch_size=1, precision="bf16-true",
    )  # fmt: skip
    return replace(request, **changes)


def train(folder: Path, config: transformers.PreTrainedConfig, tokens: int, **settings: Any) -> Plan:
    """The plan of a step."""
    ids = torch.randint(0, 96, (1, tokens), generator=torch.Generator().manual_seed(0))
    strategy = MemoStrategy(host_memory="1GiB", fused_kernels=FUSED, **settings)
    trainer = make_trainer(strategy, max_steps=1, default_root_dir=str(folder), precision="32-true")
    build = LanguageModel(lambda: transformers.AutoModelForCausalLM.from_config(config).train())
    trainer.fit(build, batches([{"input_ids": ids, "labels": ids}]))
    return trainer.strategy.plan


# ---- shapes


def test_weights_of_a_large_mixture() -> None:
    shape = load_model("qwen3_30b_a3b")
    assert shape.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert shape.active_parameters == pytest.approx(3.35e9, rel=1e-3)
    assert shape.multiplied_parameters == shape.active_parameters - shape.vocab * shape.hidden - (48 * 2 + 1) * 2048


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_hugging_face(case: str) -> None:
    """Without biases and norms of queries, keys and latents, which the estimate leaves out."""
    config, shape = configured(case)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    left_out = ("bias", "q_norm.weight", "k_norm.weight", "sinks", "a_layernorm.weight")
    counted = {name: p for name, p in model.named_parameters() if not name.endswith(left_out)}
    assert shape.parameters == sum(p.numel() for p in counted.values())
    idle = sum(p.numel() * 7 // 10 for name, p in counted.items() if ".experts." in name)
    assert shape.active_parameters == shape.parameters - idle


def test_layers_that_differ_are_parts() -> None:
    def parts(name: str, **changes: Any) -> list[tuple[int, int, int | None]]:
        config = transformers.AutoConfig.for_model(name, **changes).to_dict()
        return [(part.layers, part.experts, part.window) for part in shape_of(config, name).runs]

    assert parts("deepseek_v3") == [(3, 1, None), (58, 256, None)]
    assert parts("gpt_oss", num_hidden_layers=3) == [(1, 128, 128), (1, 128, None), (1, 128, 128)]
    assert parts("qwen3_moe", num_hidden_layers=5, decoder_sparse_step=2) == [
        (1, 1, None), (1, 128, None), (1, 1, None), (1, 128, None), (1, 1, None)
    ]  # fmt: skip
    assert parts("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[2, 3]) == [(2, 128, None), (2, 1, None)]
    assert parts("qwen3_moe", num_hidden_layers=4) == [(4, 128, None)]
    types = ["full_attention", "full_attention", "sliding_attention"]
    assert parts("mistral", num_hidden_layers=3, layer_types=types) == [(2, 1, None), (1, 1, 4096)]
    with pytest.raises(ValueError, match="layers=36 must be the sum"):
        replace(load_model("qwen3_8b"), parts=(load_model("qwen3_8b"),) * 2)


# ---- what layers save


@slow_if(lambda case, precision: case not in OFTEN or precision != "bf16-mixed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("case", CASES)
def test_what_layers_keep_is_measured_to_the_byte(case: str, precision: Precision) -> None:
    """Except for the offsets of experts, whose size does not depend on the tokens."""
    config, shape = configured(case)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    batch, tokens = 2, 320
    ids = torch.randint(0, 96, (batch, tokens), generator=torch.Generator().manual_seed(0))
    with EngineUnderTest(model, test_mode=None) as under_test:
        under_test.profile_step({"input_ids": ids, "labels": ids}, amp=precision == "bf16-mixed")
        layers = under_test.profile.in_order()
    parts = [part for part in shape.runs for _ in range(part.layers)]
    for part, layer in zip(parts, layers, strict=True):
        tensors = saved_tensors(part, sizes=bytes_of(precision, 1))
        measured = [size for item in layer.saved if (size := item.size_bytes // (batch * tokens))]
        assert sorted(measured) == sorted(tensor.bytes_per_token for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_an_estimate_takes_what_training_measures(tmp_path: Path, case: str) -> None:
    """Buffers within the backward are an upper bound. Training measures the copies of a CPU, too."""
    config, shape = configured(case, num_hidden_layers=4)
    tokens = 1024
    measured = train(tmp_path, config, tokens, test_mode=BY_ALPHA, device_memory="1GiB").costs
    told = estimated_layer_costs(ask(shape=shape, gpus=1, seq_len=tokens, precision="32-true"), Parallelism())
    assert (told.input_bytes, told.attention_bytes) == (measured.input_bytes, measured.attention_bytes)
    offsets = [4 * part.experts if part.experts > 1 else 0 for part in shape.runs for _ in range(part.layers)]
    assert measured.other_bytes == tuple(map(sum, zip(told.other_bytes, offsets, strict=True)))
    assert told.fixed_device_bytes == pytest.approx(measured.fixed_device_bytes, rel=2e-3)
    assert 1 <= told.working_bytes(1.0) / measured.working_bytes(1.0) < 1.16


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_tensor_parallel_processes_share_rows_but_not_routing(case: str) -> None:
    _, shape = configured(case)
    part, sizes = shape.runs[-1], bytes_of("32-true", 2)
    one, two = (
        {t.name: t.bytes_per_token for t in saved_tensors(part, sizes=sizes, tensor_parallel=tp)} for tp in (1, 2)
    )
    assert two["rows"] == one["rows"] and two["activated"] == one["activated"]
    twice = {name for name, size in two.items() if size == 2 * one[name]}
    assert {"probabilities", "chosen experts"} <= twice
    assert ("shared up" in twice) == (case == "deepseek_v3")


@slow_if(lambda case: case != "deepseek_v3")
@pytest.mark.parametrize(
    "case", ["qwen3_moe", "qwen2_moe", "mixtral", "granitemoe", "gpt_oss", "glm4_moe", "deepseek_v3"]
)
def test_products_are_those_of_training(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of experts have no name in a plan."""
    monkeypatch.setattr(solve_plan, "plain_plan", lambda *_: None)
    config, shape = configured(case, num_hidden_layers=4)
    costs = train(tmp_path, config, 64, test_mode=BY_KIND, device_memory="64MiB").storage_costs
    assert costs is not None
    calls = [costs.classes[number] for number in costs.call_classes]
    runs = [
        run
        for run in ask(shape=shape, seq_len=64, precision="32-true").runs(Parallelism())
        for _ in range(run.shape.layers)
    ]
    for run, call in zip(runs, calls, strict=True):
        told = {product.name: product.size_bytes for product in recomputed_products(run, 64)}
        assert told == {product.name: product.size_bytes for product in call.products}


# ---- weights of a process


@pytest.mark.parametrize(("groups", "shards"), [(1, 8), (2, 4), (8, 1)])
def test_a_process_holds_its_share_of_the_experts(groups: int, shards: int) -> None:
    request, parallel = ask(), replace(RING, expert_parallel_size=groups)
    shape = request.shape
    experts = 48 * 128 * 3 * 2048 * 768
    counts = device_parameters(shape, parallel)
    assert (counts.experts, counts.others) == (experts / groups, shape.parameters - experts - 2048)
    assert [ranks for _, ranks, _ in counts.by_ranks(parallel)] == [8, shards]
    state = device_state_bytes(request, parallel)
    sharded = counts.others / 8 + experts / 8  # by either way of dividing them
    assert (state.parameters, state.optimizer) == pytest.approx((2 * sharded, 4 * sharded))
    gathered = gathered_bytes(request, parallel)
    layer = layer_weights(shape, parallel)
    embedding, sharded_layer = 151936 * 2048, layer.others + (layer.experts if shards > 1 else 0)
    assert gathered == pytest.approx(max(6 * sharded_layer, 2 * embedding) + 4 * embedding)


def test_tensor_parallelism_divides_experts_but_not_the_router() -> None:
    shape = load_model("qwen3_30b_a3b")
    one, two = (layer_weights(shape, Parallelism(tp=tp)) for tp in (1, 2))
    both = layer_weights(shape, Parallelism(tp=2, dp=4, expert_parallel_size=4))
    assert (two.experts, both.experts) == (one.experts / 2, one.experts / 8)
    assert two.others - one.others / 2 == both.others - one.others / 2 == 2048 * 128 / 2


def test_stages_of_a_pipeline_divide_their_own_experts() -> None:
    shape, sizes = ask().shape, {"pp": 2, "dp": 4}
    whole, one = device_parameters(shape, Parallelism(dp=8)), device_parameters(shape, Parallelism(**sizes))
    both = device_parameters(shape, Parallelism(**sizes, expert_parallel_size=4))
    assert one.experts == whole.experts / 2
    assert (both.experts, both.others) == (one.experts / 4, one.others)
    found = _answers(ask(batch_size=8), {"pp": 2, "cp": 4, "zero_stage": 1})
    assert {answer.parallel.expert_parallel_size for answer in found} == {1, 2, 4}


# ---- time


def test_tokens_go_to_their_experts_and_back() -> None:
    none, two, eight = (layer_times(ask(), replace(RING, expert_parallel_size=n)) for n in (1, 2, 8))
    assert none.exchange == none.expert_parallel == 0
    # A token needs a device unless all 8 of its 128 experts are among the 112 of other devices.
    token, chosen = 2**20 / 8 * 2048 * 2, 8 * (1 - comb(112, 8) / comb(128, 8))
    assert 5 < chosen < 6
    assert eight.exchange == pytest.approx(token * chosen * 7 / 8 / ask().cluster.node_bandwidth)
    assert two.exchange < eight.exchange
    assert eight.forward - none.forward == pytest.approx(2 * eight.exchange)
    assert eight.backward - none.backward == pytest.approx(2 * eight.exchange)
    assert eight.recompute - none.recompute == pytest.approx(eight.exchange)
    assert eight.expert_parallel == pytest.approx(4 * eight.exchange)
    nodes = layer_times(ask(gpus=16), Parallelism(cp=16, expert_parallel_size=16))
    chosen = 16 * (1 - comb(120, 8) / comb(128, 8))
    assert nodes.exchange == pytest.approx(token / 2 * chosen * 8 / 16 / ask().cluster.network_bandwidth)


def test_choices_send_as_many_tokens_as_random_ones() -> None:
    """Also with tensor parallelism, where each device sends the tokens that need its own share of the experts."""
    _, shape = configured("mixtral", num_local_experts=16)
    request, tokens = ask(shape=shape, gpus=4, seq_len=2**14), 2**14
    chosen = torch.rand(tokens, 16, generator=torch.Generator().manual_seed(0)).topk(3).indices
    homes = torch.zeros(tokens, 4, dtype=torch.bool).scatter_(1, chosen // 4, True)
    assert received_tokens(request.shape, request.seq_len, Parallelism(dp=4, expert_parallel_size=4)) == pytest.approx(
        homes.sum().item(), rel=0.02
    )
    both = Parallelism(dp=2, tp=2, expert_parallel_size=2)
    assert received_tokens(request.shape, request.seq_len, both) == pytest.approx(homes[:, ::2].sum().item(), rel=0.02)


@pytest.mark.parametrize("size", [1, 4])
def test_the_parts_of_a_step_add_up(size: int) -> None:
    request, parallel = ask(), replace(RING, expert_parallel_size=size)
    answer = estimate(request, parallel)
    parts = step_parts(request, answer)
    assert sum(parts.values()) == pytest.approx(answer.step_seconds)
    assert (parts["expert-parallel traffic"] > 0) == (size > 1)


def test_layers_that_differ_take_their_own_time() -> None:
    """Layers with a window of 128 keys take a fraction of the time; layers without experts have their own width."""
    _, shape = configured("gpt_oss", num_hidden_layers=4, hidden_size=512, sliding_window=128)
    request = ask(shape=shape, gpus=1, seq_len=2**17, method="full_recompute")
    first, second = (layer_times(run, Parallelism()) for run in request.runs(Parallelism())[:2])
    assert 100 * first.attention_forward < second.attention_forward
    assert first.dense == second.dense
    costs = estimated_layer_costs(request, Parallelism())
    assert costs.forward_seconds[0] == costs.forward_seconds[2] < costs.forward_seconds[1]
    assert shape.model_flops(2**17) < replace(shape, parts=()).model_flops(2**17)
    answer = estimate(request, Parallelism())
    again = 2 * (first.forward + second.forward)
    assert answer.recompute_seconds == pytest.approx(again)


def test_plans_of_layers_that_differ_name_kinds_of_both() -> None:
    _, shape = configured("deepseek_v3", num_hidden_layers=8, hidden_size=2048, first_k_dense_replace=3)
    cluster = replace(load_cluster("h200"), host_bytes=2**36, device_bytes=40 * 2**30)
    answer = estimate(ask(shape=shape, gpus=1, seq_len=2**17, cluster=cluster), Parallelism())
    assert answer.status == "ok" and answer.storage is not None and answer.recompute_seconds is not None
    assert {"mlp.up_proj", "mlp.shared_experts.up_proj", "self_attn.kv_b_proj"} <= answer.storage.keys()
    assert all(0 <= share <= 1 + 1e-9 for shares in answer.storage.values() for share in shares.values())
    assert answer.mfu is not None and answer.hfu is not None and answer.mfu < answer.hfu


# ---- the command


def test_the_search_divides_experts() -> None:
    found = {answer.parallel.expert_parallel_size for answer in _answers(ask(), {"tp": 1, "cp": 8, "zero_stage": 3})}
    assert found == {1, 2, 4, 8}
    dense = ask(shape=load_model("qwen3_8b"))
    assert {answer.parallel.expert_parallel_size for answer in _answers(dense, {"tp": 1, "zero_stage": 3})} == {1}


def _answers(request: EstimateRequest, forced: dict[str, int]) -> list[Any]:
    ranking = search(request, forced)
    return [ranking.best, *(alternative.estimate for alternative in ranking.alternatives)]


def test_a_folder_of_a_mixture(tmp_path: Path, in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    config, _ = configured("deepseek_v3")
    config.save_pretrained(tmp_path)
    settings = [f"model.path={tmp_path}", "cluster=h100", "gpus=2", "seq_len=8K", "batch_size=2"]
    settings += ["parallel.dp=2", "parallel.expert_parallel_size=2"]
    status, out, err = in_process(main, *settings)
    assert (status, err) == (0, "")
    out = " ".join(out.split())
    assert "of them active" in out and "TP 1, CP 1, DP 2, PP 1, EP 2" in out
    status, out, _ = in_process(main, *settings, "output=json")
    assert json.loads(out)["parallel"]["expert_parallel_size"] == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("model=qwen3_30b_a3b parallel.expert_parallel_size=3", ["3 does not divide the experts, 128"]),
        (
            "model=qwen3_30b_a3b parallel.cp=4 parallel.tp=2 parallel.expert_parallel_size=8",
            ["8 does not divide the data- and context-parallel processes, 4", "expert_parallel_size=1, 2 or 4"],
        ),
        (
            "model=qwen3_30b_a3b gpus=48 parallel.cp=6 parallel.dp=8 parallel.expert_parallel_size=4",
            ["expert_parallel_size=4 and cp=6: one must divide the other"],
        ),
        ("model=qwen3_8b parallel.expert_parallel_size=2", ["expert_parallel_size=2 is for mixtures of experts"]),
        ("model=qwen3_30b_a3b parallel.expert_parallel_size=0", ["give an integer of at least 1"]),
        ("model=qwen3_30b_a3b model.lora.r=8", ["adapters", "dense"]),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused_in_one_line(in_process: Any, settings: str, words: list[str]) -> None:
    status, out, err = in_process(main, "gpus=8", "batch_size=8", "seq_len=960K", *settings.split())
    assert (status, out) == (2, "") and err.count("\n") == 1
    for word in words:
        assert word in err


def test_parts_have_no_pipeline() -> None:
    _, shape = configured("deepseek_v3")
    with pytest.raises(ValueError, match="layers differ are estimated without pipeline parallelism"):
        estimate(ask(shape=shape, gpus=2, seq_len=2**14), Parallelism(pp=2))
