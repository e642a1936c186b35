"""The sizes of the estimate are those that training measures, and lead to the same plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from support.alpha_plans import memory_by
from support.devices import FUSED
from support.harness import EngineUnderTest
from support.markers.slow import slow_if
from support.modes import BY_ALPHA
from support.trainer_harness import batches, make_trainer
from support.training_bytes import slot_bytes_by_alpha, step_bytes

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.cli.hydra_command import config_dir
from lightning_memo.estimate.cluster import constants_of, load_cluster, load_model
from lightning_memo.estimate.layer_buffers import Buffers
from lightning_memo.estimate.planner_inputs import estimated_layer_costs
from lightning_memo.estimate.request import EstimateRequest, Parallelism
from lightning_memo.estimate.saved_tensors import Precision, bytes_of, layer_activations, saved_tensors
from lightning_memo.estimate.step_estimate import estimate
from lightning_memo.models import CausalLM
from lightning_memo.planner import Restrictions, make_plan
from lightning_memo.shapes.hf_config import shape_of
from lightning_memo.shapes.model_shape import ModelShape, adapters_of

SIZES = {precision: bytes_of(precision, 1) for precision in get_args(Precision)}
FP32 = SIZES["32-true"]
DEMO_TOKENS = 1024
SHAPE = ModelShape(
    name="small",
    layers=2,
    hidden=64,
    ffn=176,
    heads=4,
    kv_heads=4,
    head_dim=16,
    vocab=96,
    gated=True,
    tied=False,
    kernels="llama",
)
SETTINGS = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 256, "use_cache": False,
}  # fmt: skip
GPT2 = {
    "n_embd": 64, "n_inner": 176, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 256, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
FAMILIES = {
    "llama": ("llama", SETTINGS, SHAPE),
    "llama_grouped": ("llama", SETTINGS | GROUPED, replace(SHAPE, kv_heads=2)),
    "qwen3": ("qwen3", SETTINGS | GROUPED | {"head_dim": 24}, replace(SHAPE, kv_heads=2, head_dim=24)),
    "gpt_neox": ("gpt_neox", SETTINGS | {"use_parallel_residual": False}, replace(SHAPE, gated=False)),
    "gpt_neox_parallel": ("gpt_neox", SETTINGS, replace(SHAPE, gated=False)),
    "gpt2": ("gpt2", GPT2, replace(SHAPE, gated=False)),
}


@slow_if(lambda family, precision: precision == "bf16-true" and family != "llama")
@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_layers_keep_is_measured_to_the_byte(family: str, precision: Precision) -> None:
    model_type, settings, shape = FAMILIES[family]
    config = transformers.AutoConfig.for_model(model_type, **settings)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    batch, tokens = 2, 160
    ids = torch.randint(0, 96, (batch, tokens))
    with EngineUnderTest(model, test_mode=None, fused_kernels=FUSED) as under_test:
        under_test.profile_step({"input_ids": ids, "labels": ids}, amp=precision == "bf16-mixed")
        profile = under_test.profile
    kernels = shape_of(config.to_dict(), family).kernels
    assert kernels == family.removesuffix("_grouped")
    shape = replace(shape, kernels=kernels, fused=FUSED)
    expected = layer_activations(shape, sizes=SIZES[precision])
    measured = [
        profile.bytes_of(*kinds)[0] // (batch * tokens)
        for kinds in (("input",), ("out", "lse"), ("query", "key", "value", "other"))
    ]
    assert measured == [expected.input, expected.attention, expected.others]
    tensors = saved_tensors(shape, sizes=SIZES[precision])
    sizes = [item.size_bytes // (batch * tokens) for item in profile.in_order()[0].saved]
    assert sorted(sizes) == sorted(tensor.bytes_per_token for tensor in tensors)


ADAPTERS = {"default": None, "all": "all-linear", "output": ["o_proj"], "part": ["gate_proj", "down_proj"]}


@slow_if(lambda family, precision: family == "qwen3" or precision == "bf16-true")
@pytest.mark.parametrize("modules", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize("family", ["llama_grouped", "qwen3"])
def test_what_layers_with_adapters_keep_is_measured_to_the_byte(
    family: str, precision: Precision, modules: str | list[str] | None
) -> None:
    peft = pytest.importorskip("peft")
    if FUSED and precision == "32-true":
        pytest.skip("attention in fp32 saves something else on a GPU")
    model_type, settings, shape = FAMILIES[family]
    adapters = adapters_of({"r": 5, "target_modules": modules})
    shape = replace(shape, kernels=model_type, adapters=adapters, fused=FUSED)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=5, target_modules=modules)).to(dtype)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == shape.layers * shape.adapter_parameters
    batch, tokens = 2, 160
    ids = torch.randint(0, 96, (batch, tokens))
    with EngineUnderTest(model, test_mode=None, fused_kernels=FUSED) as under_test:
        under_test.profile_step({"input_ids": ids, "labels": ids}, amp=precision == "bf16-mixed")
        saved = under_test.profile.in_order()[1].saved  # through the first layer goes no gradient
    tensors = saved_tensors(shape, sizes=SIZES[precision])
    sizes = [item.size_bytes // (batch * tokens) for item in saved]
    assert sorted(sizes) == sorted(tensor.bytes_per_token for tensor in tensors)


def test_the_lower_bound_is_the_largest_load() -> None:
    buffers = Buffers()
    kept, short = buffers.make(10), buffers.make(5)
    buffers.free(short)
    buffers.make(3)
    buffers.free(kept)
    buffers.make(4)
    assert buffers.lower_bound_bytes == 15


def test_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"small: buffers are known for dense layers of Llama and Qwen3"):
        step_bytes(replace(SHAPE, kernels="gpt_neox"), sizes=FP32, tokens=16)


# ---- the demo model, trained by a user

DEMO = replace(load_model("llama_tiny"), fused=FUSED)
DEMO_BUDGETS = {"device_memory": "200MiB", "host_memory": "96MiB"}  # those of conf/experiment/demo.yaml
LENGTHS = (512, DEMO_TOKENS)


def train(
    folder: Path,
    tokens: int,
    precision: Precision = "32-true",
    lora: dict[str, Any] | None = None,
    **changes: int | bool,
) -> Plan:
    """The plan of a short run of the demo model with a changed configuration."""
    config = OmegaConf.to_container(OmegaConf.load(Path(config_dir()) / "model" / "llama_tiny.yaml"))["config"]
    ids = torch.randint(0, DEMO.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    strategy = MemoStrategy(test_mode=BY_ALPHA, fused_kernels=FUSED, **DEMO_BUDGETS)
    trainer = make_trainer(strategy, max_steps=1, default_root_dir=str(folder), precision=precision)
    trainer.fit(
        CausalLM({"config": config | changes, "lora": lora or {}}), batches([{"input_ids": ids, "labels": ids}])
    )
    return trainer.strategy.plan


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Plan]:
    """The plans of short runs of the demo model, by length."""
    return {tokens: train(tmp_path_factory.mktemp("run"), tokens) for tokens in LENGTHS}


def predicted(measured: LayerCosts) -> LayerCosts:
    """Layer costs with measured times and bandwidths and predicted sizes."""
    return replace(measured, **asdict(step_bytes(DEMO, sizes=FP32, tokens=measured.tokens)))


def plan(costs: LayerCosts, budget: Budget, label: Fingerprint, *, may_be_plain: bool = True) -> Plan:
    """Calls the planner as training does, with slots of the predicted size."""
    memory_of = memory_by(
        lambda alpha: slot_bytes_by_alpha(DEMO, sizes=FP32, tokens=costs.tokens, alpha=alpha), costs.swapped_calls
    )
    return make_plan(costs, budget, label, Restrictions(may_be_plain=may_be_plain), memory_of)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_predicted_bytes_are_within_3_percent_of_the_measured_ones(plans: dict[int, Plan], tokens: int) -> None:
    costs = plans[tokens].costs
    expected = step_bytes(DEMO, sizes=FP32, tokens=tokens)
    for name in ("input_bytes", "attention_bytes", "other_bytes", "fixed_device_bytes"):
        assert getattr(expected, name) == getattr(costs, name), name
    assert expected.transient_device_bytes == pytest.approx(costs.transient_device_bytes, rel=0.03)
    for recomputed in (0.0, 0.5, 1.0):
        assert predicted(costs).working_bytes(recomputed) == pytest.approx(costs.working_bytes(recomputed), rel=0.03)
    in_backward = costs.backward_device_bytes + costs.other_bytes[0]
    assert expected.backward_device_bytes + expected.other_bytes[0] == pytest.approx(in_backward, rel=0.03)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_what_is_planned_for_predicted_bytes_is_what_training_planned(plans: dict[int, Plan], tokens: int) -> None:
    trained = plans[tokens]
    expected = plan(predicted(trained.costs), trained.budget, trained.fingerprint)
    assert (expected.swap, expected.step_seconds) == (trained.swap, trained.step_seconds)
    assert expected.device_bytes == pytest.approx(trained.device_bytes, rel=0.03)
    assert expected.working_set_bytes == pytest.approx(trained.working_set_bytes, rel=0.03)
    assert (trained.swap.plain) == (tokens < DEMO_TOKENS)  # the demo's budget is too small for the demo's length


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 0.03), ("bf16-true", 0.03), ("bf16-mixed", 0.06)])
def test_an_estimate_takes_what_training_measures(tmp_path: Path, precision: Precision, tolerance: float) -> None:
    """Under autocast, a CPU also copies operands of another type: up to 6 % of the forward. A GPU does not."""
    trained = train(tmp_path, DEMO_TOKENS, precision)
    request = EstimateRequest(
        shape=DEMO, cluster=load_cluster("h100"), constants=constants_of("h100"), method="memo", gpus=1,
        seq_len=DEMO_TOKENS, batch_size=1, precision=precision, alpha=trained.swap.alpha, fused_kernels=FUSED,
    )  # fmt: skip
    told, measured = estimated_layer_costs(request, Parallelism()), trained.costs
    for name in ("input_bytes", "attention_bytes", "other_bytes"):
        assert getattr(told, name) == getattr(measured, name), name
    assert told.fixed_device_bytes == pytest.approx(measured.fixed_device_bytes, rel=1e-3)
    assert told.transient_device_bytes == pytest.approx(measured.transient_device_bytes, rel=tolerance)
    assert told.working_bytes(1.0) == pytest.approx(measured.working_bytes(1.0), rel=tolerance)
    if not trained.swap.plain:
        total = estimate(request, Parallelism()).device_bytes["total"]
        assert total == pytest.approx(trained.device_bytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "v_proj"]], ids=["all", "two"])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 0.03), ("bf16-true", 0.03), ("bf16-mixed", 0.06)])
def test_an_estimate_with_adapters_takes_what_training_measures(
    tmp_path: Path, precision: Precision, tolerance: float, modules: str | list[str]
) -> None:
    pytest.importorskip("peft")
    lora = {"r": 8, "target_modules": modules}
    measured = train(tmp_path, DEMO_TOKENS, precision, lora).costs
    told = step_bytes(replace(DEMO, adapters=adapters_of(lora)), sizes=SIZES[precision], tokens=DEMO_TOKENS)
    for name in ("input_bytes", "attention_bytes", "fixed_device_bytes"):
        assert getattr(told, name) == getattr(measured, name), name
    # No gradient goes through the first layer, which therefore saves less.
    assert told.other_bytes[1:] == measured.other_bytes[1:] and told.other_bytes[0] >= measured.other_bytes[0]
    assert told.transient_device_bytes == pytest.approx(measured.transient_device_bytes, rel=tolerance)
    working = replace(measured, **asdict(told)).working_bytes(1.0)
    assert working == pytest.approx(measured.working_bytes(1.0), rel=tolerance)


@pytest.mark.parametrize("share", [0.1, 0.37, 0.8])
@pytest.mark.parametrize("bound", ["host", "overlap"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_alpha_is_that_of_measured_bytes(plans: dict[int, Plan], tokens: int, bound: str, share: float) -> None:
    """For both limits: the host memory, or the copies that can be hidden."""
    trained = plans[tokens]
    measured = trained.costs
    swapped = measured.swapped_bytes(0, share)
    room = swapped * (measured.calls - 2) if bound == "host" else measured.skeletal_bytes
    enough = measured.skeletal_bytes / min(measured.offload_bytes_per_second, measured.prefetch_bytes_per_second)
    seconds = swapped / measured.offload_bytes_per_second if bound == "overlap" else enough
    # To recompute takes less time than to wait for a copy.
    times = {"forward_seconds": seconds, "backward_seconds": enough, "recompute_seconds": seconds / 1000}
    measured = replace(measured, **{name: (value,) * measured.calls for name, value in times.items()})
    budget = Budget(device_bytes=2**50, host_bytes=room)
    both = (measured, predicted(measured))
    plans_of = [plan(costs, budget, trained.fingerprint, may_be_plain=False).swap for costs in both]
    assert plans_of[0].alpha == plans_of[1].alpha == pytest.approx(share, abs=0.01)
    assert plans_of[0] == plans_of[1]


@pytest.mark.parametrize(
    ("tokens", "config", "shape"),
    [
        (512, {"num_key_value_heads": 2}, {"kv_heads": 2}),
        (512, {"intermediate_size": 256}, {"ffn": 256}),  # attention's backward has the peak
        (512, {"vocab_size": 8192}, {"vocab": 8192}),  # the loss has it
        (64, {"tie_word_embeddings": True}, {"tied": True}),  # the optimizer has it
    ],
    ids=["grouped", "small_ffn", "large_vocabulary", "tied_and_short"],
)
def test_peaks_are_predicted_wherever_they_are(
    tmp_path: Path, tokens: int, config: dict[str, Any], shape: dict[str, Any]
) -> None:
    measured = train(tmp_path, tokens, num_hidden_layers=2, **config).costs
    expected = step_bytes(replace(DEMO, layers=2, **shape), sizes=FP32, tokens=tokens)
    told = replace(measured, **asdict(expected))
    assert told.fixed_device_bytes == measured.fixed_device_bytes
    assert told.transient_device_bytes == pytest.approx(measured.transient_device_bytes, rel=0.03)
    # A peak below the size of gradients that do not exist yet is reported as 0.
    assert told.backward_device_bytes == pytest.approx(measured.backward_device_bytes, rel=0.03)
