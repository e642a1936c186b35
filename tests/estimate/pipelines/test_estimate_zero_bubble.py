"""Estimates of pipelines whose gradients of weights are computed later: idle time, memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import peft
import pytest
import torch
import transformers

from lightning_memo.config import PIPELINE_SCHEDULES, ZERO_COMMUNICATION
from lightning_memo.estimate import EstimateRequest, constants_of, load_cluster, load_model, search
from lightning_memo.estimate.device_bytes import waiting_bytes, waiting_bytes_per_token
from lightning_memo.estimate.parallelism_search import step_parts
from lightning_memo.estimate.request import Parallelism, Schedule, ZeroCommunication
from lightning_memo.estimate.step_estimate import estimate
from lightning_memo.estimate.step_times import idle_blocks, layer_times
from lightning_memo.parallel.pipeline.pipeline_gradients import WeightGradients
from lightning_memo.parallel.pipeline.stage_order import training_order
from lightning_memo.shapes.hf_config import shape_of
from lightning_memo.shapes.model_shape import Adapters

LATER = Parallelism(cp=2, pp=4, zero_stage=1, pipeline_schedule="zero_bubble")
AT_ONCE = replace(LATER, pipeline_schedule="1f1b")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


def ask(**changes: Any) -> EstimateRequest:
    request = EstimateRequest(
        shape=load_model("llama3_8b"), cluster=load_cluster("h100"), constants=constants_of("h100"),
        method="memo", gpus=8, seq_len=2**13, batch_size=8, precision="bf16-true",
    )  # fmt: skip
    return replace(request, **changes)


# ---- idle time


def seconds_of(stages: int, micro_batches: int, blocks: int, times: tuple[float, float, float]) -> float:
    """The end of a batch, from the orders of all stages and what each action waits for."""
    forward, hidden, weights = times
    orders = [training_order(stage, stages, micro_batches, blocks, zero_bubble=True) for stage in range(stages)]
    ends: dict[tuple[bool, int, int], float] = {}
    done, clocks = [0] * stages, [0.0] * stages
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        before = sum(done)
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                action, places = order[done[stage]], stages * blocks
                number, place = action.micro_batch, action.block * stages + stage
                needed = (False, number, place - 1) if not action.backward else (True, number, place + 1)
                if action.backward and place == places - 1:
                    needed = (False, number, place)
                start = clocks[stage]
                if not action.weights and needed[2] >= 0:
                    if needed not in ends:
                        break
                    start = max(start, ends[needed])
                seconds = hidden + (weights if stage == 0 else 0.0) if action.backward else forward
                clocks[stage] = start + (weights if action.weights else seconds)
                if not action.weights:
                    ends[action.backward, number, place] = clocks[stage]
                done[stage] += 1
        assert sum(done) > before, "the stages wait for each other"
    return max(clocks)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 6, 8, 13])
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.5, 0.5), (2, 5, 1)], ids=str)
def test_stages_wait_as_long_as_in_their_order(
    blocks: int, micro_batches: int, times: tuple[float, float, float]
) -> None:
    stages, (forward, hidden, weights) = 4, times
    block = forward + hidden + weights
    idle = idle_blocks(stages, micro_batches, blocks, forward / block, weights / block) * block
    assert idle == pytest.approx(seconds_of(stages, micro_batches, blocks, times) - micro_batches * blocks * block)
    whole_rounds = micro_batches >= stages if blocks == 1 else micro_batches % stages == 0
    if whole_rounds:
        assert idle == pytest.approx((stages - 1) * (forward + hidden - weights))
    else:
        assert idle > (stages - 1) * (forward + hidden - weights)


@pytest.mark.parametrize(("tokens", "percent"), [(2**13, 28), (2**16, 14), (2**17, 9)])
def test_share_of_weights_falls_with_the_length(tokens: int, percent: int) -> None:
    request = ask(seq_len=tokens)
    even = replace(
        request.constants, dense_efficiency=1, attention_forward_efficiency=1, attention_backward_efficiency=1
    )
    times = layer_times(replace(request, constants=even), LATER)
    products = times.dense + times.dense_backward + times.attention_forward + times.attention_backward
    assert times.later == pytest.approx(times.dense)
    assert 100 * times.later / products == pytest.approx(percent, abs=0.5)


def test_the_choices_are_those_of_training() -> None:
    assert get_args(Schedule) == PIPELINE_SCHEDULES
    assert get_args(ZeroCommunication) == ZERO_COMMUNICATION


def test_adapters_and_experts_wait_for_nothing() -> None:
    shape = replace(load_model("llama3_8b"), adapters=Adapters(rank=16, products=("query", "value")))
    adapted = ask(shape=shape, fused_kernels=False)  # later gradients of weights are computed by single operations
    assert layer_times(adapted, LATER).later == 0
    idle = [step_parts(adapted, estimate(adapted, parallel))["idle pipeline stages"] for parallel in (LATER, AT_ONCE)]
    assert idle[0] == pytest.approx(idle[1])
    mixture, shape = ask(shape=load_model("qwen3_30b_a3b")), load_model("qwen3_30b_a3b")
    times = layer_times(mixture, LATER)
    weights = shape.attention.parameters + shape.routing_parameters
    assert times.later / times.dense == pytest.approx(weights / (weights + 8 * shape.ffn_parameters))


def test_a_step_waits_less() -> None:
    request = ask(cluster=replace(load_cluster("h100"), device_bytes=2**39))
    later, at_once = estimate(request, LATER), estimate(request, AT_ONCE)
    assert later.step_seconds is not None and at_once.step_seconds is not None
    weights = 8 * layer_times(request, LATER).later  # layers of a stage
    parts = [step_parts(request, answer)["idle pipeline stages"] for answer in (later, at_once)]
    assert parts[1] - parts[0] == pytest.approx(3 * 2 * weights)
    assert at_once.step_seconds - later.step_seconds == pytest.approx(3 * 2 * weights, rel=1e-6)
    shares = [next(limit for limit in answer.limits if "is idle for" in limit) for answer in (later, at_once)]
    assert "is idle for 27%" in shares[1] and "is idle for 27%" not in shares[0]


# ---- memory


def configured(model_type: str, **settings: Any) -> tuple[transformers.PreTrainedConfig, torch.nn.Module]:
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, "intermediate_size": 48, **settings})
    return config, transformers.AutoModelForCausalLM.from_config(config).train()


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mixture": ("qwen3_moe", FEW_EXPERTS),
    "joined products": ("gpt_neox", {}),
    "no linear layers": ("gpt2", {}),
    "adapters": ("llama", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_what_training_keeps(name: str) -> None:
    model_type, settings = MODELS[name]
    config, model = configured(model_type, **settings)
    shape, tokens = shape_of(config.to_dict(), name), 40
    layers = model.base_model
    if name == "adapters":
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        shape = replace(shape, adapters=Adapters(rank=4, products=("query", "down")))
    gradients = WeightGradients(lambda t: None)
    with gradients.computing_linear():
        x = torch.randn(1, tokens, config.hidden_size, requires_grad=True)
        out = layers(inputs_embeds=x, use_cache=False).last_hidden_state
        with gradients.waiting((0, 0), out):
            out.backward(torch.randn_like(out))
        kept = gradients.nbytes((0, 0))
    request = ask(shape=shape, precision="32-true", seq_len=tokens, gpus=1)
    assert waiting_bytes_per_token(request, 1) * tokens * shape.layers == kept
    assert (kept == 0) == (name == "no linear layers")


def test_tensor_parallelism_divides_what_is_not_gathered() -> None:
    request = ask()
    assert waiting_bytes_per_token(request, 1) == 53_248 + 86_016  # inputs, and gradients of outputs
    inputs = 2 * 4 * 4096 + 4096 + 14336  # of attention and feed-forward, and of their last products
    gradients = (4096 + 2 * 1024) + 2 * 14336 + 2 * 4 * 4096
    assert waiting_bytes_per_token(request, 4) == 2 * (inputs + gradients)


@pytest.mark.parametrize("blocks", [1, 2])
def test_later_stages_have_more_backwards_that_wait(blocks: int) -> None:
    request, parallel = ask(), replace(LATER, virtual_pipeline_size=blocks)
    block = 2**12 * 8 // blocks * (53_248 + 86_016)  # tokens and layers
    sizes = [waiting_bytes(replace(request, stage=stage), parallel) for stage in range(4)]
    assert sizes == [0, 2 * block, 3 * block, 4 * block]
    answer = estimate(request, parallel)
    assert answer.device_bytes["later_weight_gradients"] in sizes
    usual = replace(parallel, pipeline_schedule="1f1b")
    assert estimate(request, usual).device_bytes["later_weight_gradients"] == 0
    assert waiting_bytes(replace(request, stage=3), usual) == 0


def test_a_step_fits_if_all_stages_do() -> None:
    """So that the memory of the last one may cost more time than is gained, or be too small."""
    large, small = (
        ask(cluster=replace(load_cluster("h100"), device_bytes=size * 2**30), batch_size=64) for size in (44, 36)
    )
    at_once, later = estimate(large, AT_ONCE), estimate(large, LATER)
    assert at_once.step_seconds is not None and later.step_seconds is not None
    assert at_once.step_seconds < later.step_seconds
    (sentence,) = (limit for limit in later.limits if "needs the most" in limit)
    assert sentence.startswith("Stage 4 of 4 needs the most") and sentence.endswith("take up to 17.0 GiB on a device.")
    assert (estimate(small, AT_ONCE).status, estimate(small, LATER).status) == ("ok", "oom")


# ---- settings


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"gpus": 2}, {"pp": 1}, "pipeline_schedule=zero_bubble is for pipelines: give pp, or"),
        ({}, {"zero_stage": 2}, "pipeline_schedule=zero_bubble is for zero_stage 0 and 1, not 2: give one of them, or"),
    ],
    ids=["no pipeline", "zero 2"],
)
def test_what_training_refuses_is_not_estimated(changes: dict[str, Any], sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        estimate(ask(**changes), replace(LATER, **sizes))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="pipeline_schedule='gpipe' must be 1f1b or zero_bubble"):
        replace(LATER, pipeline_schedule="gpipe")


def test_the_order_is_given_and_not_searched() -> None:
    usual = search(ask(), {"pp": 2})
    assert {each.pipeline_schedule for each in parallelisms(usual)} == {"1f1b"}
    given = parallelisms(search(ask(), {"pp": 2, "pipeline_schedule": "zero_bubble"}))
    assert {each.pipeline_schedule for each in given} == {"zero_bubble"}
    assert {each.zero_stage for each in given} <= {0, 1}
    with pytest.raises(ValueError, match=r"give parallel\.zero_stage=0 or 1, or parallel\.pipeline_schedule=1f1b"):
        search(ask(), {"pp": 2, "zero_stage": 3, "pipeline_schedule": "zero_bubble"})


def parallelisms(ranking: Any) -> list[Parallelism]:
    return [ranking.best.parallel, *(each.estimate.parallel for each in ranking.alternatives)]
