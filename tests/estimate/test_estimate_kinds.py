"""Estimates plan by kinds of tensors where training does, from the same products and to the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.devices import FUSED
from support.markers.slow import slow_if
from support.modes import BY_KIND
from support.trainer_harness import LanguageModel, batches, make_trainer

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.plan import Plan
from lightning_memo.estimate.cluster import constants_of, load_cluster, load_model
from lightning_memo.estimate.parallelism_search import step_parts
from lightning_memo.estimate.planner_inputs import recomputed_products, storable_tensors
from lightning_memo.estimate.request import EstimateRequest, Parallelism
from lightning_memo.estimate.saved_tensors import Precision
from lightning_memo.estimate.slice_settings import Slices
from lightning_memo.estimate.step_estimate import estimate
from lightning_memo.estimate.step_times import layer_times
from lightning_memo.estimate.tables import format_alpha
from lightning_memo.planner.token_slices import memory_of_plan
from lightning_memo.runtime import solve_plan
from lightning_memo.shapes.hf_config import shape_of
from lightning_memo.shapes.model_shape import adapters_of

ALONE = Parallelism()
TOKENS = 64
SETTINGS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 256, "use_cache": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SETTINGS | {"num_key_value_heads": 2},
    "qwen3": SETTINGS | {"num_key_value_heads": 2, "head_dim": 24},
    "gpt_neox": SETTINGS,
    "gpt2": {
        "n_embd": 64, "n_inner": 176, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 256,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
        "use_cache": False,
    },
}  # fmt: skip
LORA = {"r": 4, "target_modules": "all-linear"}


def ask(**changes: Any) -> EstimateRequest:
    request = EstimateRequest(
        shape=load_model("llama3_8b"), cluster=replace(load_cluster("h200"), host_bytes=2**37),
        constants=constants_of("h200"), method="memo", gpus=1, seq_len=2**16, batch_size=1, precision="bf16-true",
    )  # fmt: skip
    return replace(request, **changes)


# ---- where plans name kinds


def test_the_default_names_kinds() -> None:
    answer = estimate(ask(), ALONE)
    assert answer.status == "ok" and answer.storage is not None and answer.alpha is not None
    assert all(sum(shares.values()) <= 1 + 1e-9 for shares in answer.storage.values())
    assert {"input", "attention", "other", "self_attn.q_proj", "mlp.up_proj"} <= answer.storage.keys()
    assert "mlp.down_proj" not in answer.storage  # the last product is not computed again
    assert sum(answer.storage["input"].values()) == 1 and answer.storage["input"]["recompute"] == 0
    assert answer.limits[0].startswith("By kind of tensor, in shares of the tokens: layer inputs and ")
    assert format_alpha(answer.alpha, answer.device_bytes, answer.storage) == "by kind"
    assert answer.device_bytes["activations"] > 0  # what is kept
    assert answer.host_bytes <= 0.75 * 2**37


def test_it_is_faster_than_a_single_alpha_on_a_small_host() -> None:
    alphas = [estimate(ask(alpha=alpha), ALONE) for alpha in (0.0, 0.1)]
    assert all(answer.storage is None for answer in alphas)
    best = estimate(ask(), ALONE)
    fitting = [answer.step_seconds for answer in alphas if answer.step_seconds is not None]
    assert fitting and best.step_seconds is not None
    assert best.step_seconds < min(fitting)


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        ({"alpha": 0.0}, ALONE),
        ({"method": "full_recompute"}, ALONE),
        ({"slices": Slices(tokens=2**14)}, ALONE),
    ],
    ids=["alpha", "method", "slices"],
)
def test_alpha_decides_elsewhere(changes: dict[str, Any], parallel: Parallelism) -> None:
    assert estimate(ask(cluster=load_cluster("h200"), **changes), parallel).storage is None


def test_stages_have_room_for_all_sequences_in_flight() -> None:
    small = replace(load_cluster("h100"), host_bytes=2**37)
    parallel, asked = Parallelism(pp=2), {"cluster": small, "gpus": 2}
    one, two, alpha = (
        estimate(ask(**asked, batch_size=size, **fixed), parallel)
        for size, fixed in ((1, {}), (2, {}), (2, {"alpha": 0.0}))
    )
    assert one.storage is not None and two.storage is not None
    kept = [sum(places["device"] for places in answer.storage.values()) for answer in (one, two)]
    assert 0 < kept[1] < kept[0]  # of each sequence
    assert max(one.host_bytes, two.host_bytes) <= 0.75 * 2**37
    assert sum(two.device_bytes.values()) / 2 <= small.device_bytes  # with the total among them
    assert two.step_seconds < alpha.step_seconds


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        ({"batch_size": 2}, Parallelism(dp=2, zero_stage=3)),
        ({"seq_len": 2**17}, Parallelism(tp=2)),
        ({"seq_len": 2**17}, Parallelism(cp=2)),
    ],
    ids=["dp", "tp", "cp"],
)
def test_several_processes_name_kinds(changes: dict[str, Any], parallel: Parallelism) -> None:
    request = ask(gpus=2, cluster=load_cluster("h200"), **changes)
    answer = estimate(request, parallel)
    assert answer.storage is not None
    assert ("mlp.gate_proj" in answer.storage) == (parallel.tp == 1)
    parts = step_parts(request, answer)
    assert parts["recomputing"] == pytest.approx(answer.recompute_seconds)
    assert sum(parts.values()) == pytest.approx(answer.step_seconds)
    alphas = [estimate(replace(request, alpha=alpha), parallel).step_seconds for alpha in (0.0, 0.25, 0.5)]
    fitting = [seconds for seconds in alphas if seconds is not None]
    assert fitting and answer.step_seconds is not None and answer.step_seconds < min(fitting)


def test_plain_training_where_that_fits() -> None:
    answer = estimate(ask(shape=load_model("llama3_2_1b"), seq_len=2**14), ALONE)
    assert answer.storage is None and answer.alpha == 0 and answer.recompute_seconds == 0
    assert answer.device_bytes["rounding_buffers"] == 0


def test_alpha_0_where_the_device_has_no_room_for_kinds() -> None:
    """It needs more than a plan may use, but less than there is, and the first step has run by it."""
    full = replace(constants_of("h200"), device_share=1.0)
    answer = estimate(ask(cluster=load_cluster("h200"), constants=full, seq_len=2**18, fused_kernels=False), ALONE)
    assert (answer.status, answer.alpha, answer.storage) == ("ok", 0.0, None)
    assert any("Device memory is the limit: even alpha=0 exceeds" in limit for limit in answer.limits)


# ---- products and bytes


def trained(
    folder: Path, family: str, precision: Precision, lora: dict[str, Any] | None
) -> tuple[Plan, EstimateRequest]:
    """The plan of a run that keeps everything, and the request whose estimate predicts its products."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32

    def build() -> torch.nn.Module:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        if lora is None:
            return model.train()
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora)).to(dtype).train()

    ids = torch.randint(0, 96, (1, TOKENS))
    strategy = MemoStrategy(test_mode=BY_KIND, device_memory="64MiB", host_memory="4MiB", fused_kernels=FUSED)
    trainer = make_trainer(strategy, max_steps=1, default_root_dir=str(folder), precision=precision)
    trainer.fit(LanguageModel(build), batches([{"input_ids": ids, "labels": ids}]))
    shape = replace(shape_of(config.to_dict(), family), adapters=adapters_of(lora or {}), fused=FUSED)
    return trainer.strategy.plan, ask(shape=shape, seq_len=TOKENS, precision=precision)


@slow_if(lambda family, precision, lora: precision != "bf16-true" and family != "llama")
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, None) for family in FAMILIES), ("llama", LORA), ("llama", LORA | {"target_modules": ["q_proj"]})],
)
def test_products_and_the_bytes_of_a_plan_are_those_of_training(
    tmp_path: Path, family: str, precision: Precision, lora: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve_plan, "plain_plan", lambda *_: None)
    plan, request = trained(tmp_path, family, precision, lora)
    products = recomputed_products(request, TOKENS)
    assert plan.storage_costs is not None and not plan.swap.storage.has_one_alpha
    # No gradient goes through the first layer of a model with adapters, which therefore saves less.
    *first, call = plan.storage_costs.classes
    assert bool(first) == (lora is not None)
    assert {p.name: p.size_bytes for p in products} == {p.name: p.size_bytes for p in call.products}
    tensors = storable_tensors(request, products, TOKENS)
    sizes = memory_of_plan(plan.swap.storage, [(tensors, TOKENS)] * plan.swap.calls, plan.swap.swapped_calls)
    assert sizes.kept >= plan.swap.memory.kept > 0 and sizes.host >= plan.swap.memory.host
    assert lora or (sizes.kept, sizes.host) == (plan.swap.memory.kept, plan.swap.memory.host)


# ---- time


def test_memory_bound_work_takes_time() -> None:
    times, slow = (
        layer_times(replace(ask(), cluster=replace(load_cluster("h200"), memory_bandwidth=rate)), ALONE)
        for rate in (4.8e12, 2.4e12)
    )
    assert times.memory_bound > 0.05 * times.dense
    assert slow.memory_bound == pytest.approx(2 * times.memory_bound)
    assert slow.forward - times.forward == pytest.approx(times.memory_bound)
    assert slow.backward - times.backward == pytest.approx(times.memory_bound_backward)
