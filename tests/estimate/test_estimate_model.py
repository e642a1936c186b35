"""Properties of the cost model that hold for any constants."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_memo.artifacts.costs import OTHER
from lightning_memo.estimate.cluster import Constants, constants_of, load_cluster, load_model, read_constants
from lightning_memo.estimate.device_bytes import (
    device_parameters,
    device_state_bytes,
    gathered_bytes,
    layer_weights,
)
from lightning_memo.estimate.parallelism_search import step_parts
from lightning_memo.estimate.planner_inputs import device_budget, estimated_layer_costs
from lightning_memo.estimate.request import EstimateRequest, Parallelism
from lightning_memo.estimate.saved_tensors import Precision
from lightning_memo.estimate.step_estimate import estimate
from lightning_memo.estimate.step_times import (
    data_parallel_seconds,
    idle_blocks,
    layer_times,
    optimizer_seconds,
    outside_seconds,
    ring_bandwidth,
)
from lightning_memo.estimate.tables import format_alpha
from lightning_memo.estimate.training_plan import alpha_plan
from lightning_memo.planner.token_slices import plan_of_alpha

RING = Parallelism(tp=4, cp=2, zero_stage=1)


def ask(**changes: object) -> EstimateRequest:
    request = EstimateRequest(
        shape=load_model("gpt_7b"),
        cluster=load_cluster("a800"),
        constants=replace(constants_of("a800"), device_share=0.9, host_share=0.4707),
        method="memo",
        gpus=8,
        seq_len=256 * 1024,
        batch_size=16,
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def test_alpha_is_the_largest_that_copies_and_host_allow() -> None:
    request = ask(seq_len=512 * 1024)
    costs, room = estimated_layer_costs(request, RING), device_budget(request, RING)
    least, other = costs.swapped_bytes(0, 0.0), costs.other_bytes[0]
    hidden = (costs.forward_seconds[0] * costs.offload_bytes_per_second - least) / other
    held = (room.host_bytes / costs.swapped_calls - least) / other
    assert 0.3 < min(hidden, held) < 0.6
    whole_tiles = plan_of_alpha(costs.tokens, min(hidden, held)).share(OTHER)
    assert alpha_plan(request, RING, costs, room, "auto").swap.alpha == whole_tiles


@pytest.mark.parametrize("method", ["memo", "full_recompute", "full_swap", "plain"])
def test_bytes_add_up_and_grow_with_the_length(method: str) -> None:
    short, long = (estimate(ask(method=method, seq_len=tokens), RING) for tokens in (2**15, 2**16))
    for answer in (short, long):
        parts = [size for kind, size in answer.device_bytes.items() if kind != "total"]
        assert answer.device_bytes["total"] == sum(parts)
        assert min(parts) >= 0
    assert short.device_bytes["total"] < long.device_bytes["total"]
    assert short.status == "ok" and short.step_seconds is not None


def test_recomputing_counts_in_hfu_only() -> None:
    """Full recomputation adds a third to the FLOPs of products; the share is smaller for attention."""
    answer = estimate(ask(method="full_recompute"), RING)
    assert answer.mfu is not None and answer.hfu is not None
    assert 1.28 < answer.hfu / answer.mfu < 1.34
    swapped = estimate(ask(method="full_swap", seq_len=2**17), RING)
    assert swapped.hfu == swapped.mfu


@pytest.mark.parametrize(
    ("changes", "shares", "beside"),
    [
        ({"method": "memo", "alpha": 0.25}, (25, 75, 0), "inputs and attention outputs are swapped"),
        ({"method": "memo", "alpha": 0.0}, (0, 100, 0), "inputs and attention outputs are swapped"),
        ({"method": "memo", "seq_len": 2**12}, (0, 0, 100), ""),
        ({"method": "full_swap"}, (100, 0, 0), "inputs and attention outputs are swapped"),
        ({"method": "full_recompute"}, (0, 100, 0), "inputs are kept on the device"),
        ({"method": "plain"}, (0, 0, 100), ""),
        ({"method": "memo", "seq_len": 2**23}, (0, 100, 0), "inputs and attention outputs are swapped"),
    ],
)
def test_what_happens_to_activations_is_the_first_that_is_told(
    changes: dict[str, object], shares: tuple[int, int, int], beside: str
) -> None:
    swapped, recomputed, kept = shares
    expected = (
        f"{swapped} % of tokens have their activations swapped, {recomputed} % recomputed, {kept} % kept on the device."
    )
    answer = estimate(ask(**{"seq_len": 2**15, **changes}), Parallelism(cp=8, zero_stage=3))
    assert answer.limits[0] == expected + (f" Layer {beside} for every token." if beside else "")
    assert (format_alpha(answer.alpha, answer.device_bytes, answer.storage) == "kept") == (
        kept == 100 and answer.alpha is not None
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_of_zero_takes_less(stage: int) -> None:
    less, more = (
        estimate(ask(), replace(RING, zero_stage=zero_stage)).device_bytes for zero_stage in (stage, stage - 1)
    )
    kind = {1: "optimizer", 2: "gradients", 3: "parameters"}[stage]
    assert less[kind] == pytest.approx(more[kind] / RING.cp, abs=1)


def test_out_of_memory_on_the_device_and_on_the_host() -> None:
    recompute = estimate(ask(method="full_recompute", seq_len=2**22), RING)
    assert (recompute.status, recompute.step_seconds, recompute.mfu) == ("oom", None, None)
    assert recompute.limits[1].startswith("Device memory is too small for the activations")
    swap = estimate(ask(method="full_swap", seq_len=2**19), RING)
    assert (swap.status, swap.alpha) == ("oohm", 1.0)
    assert swap.host_bytes > ask().cluster.host_bytes * ask().constants.host_share


@pytest.mark.parametrize("method", ["memo", "full_swap"])
def test_bytes_are_those_that_were_too_many(method: str) -> None:
    tokens = {"memo": 2**23, "full_swap": 2**19}[method]
    many, few = (estimate(ask(method=method, seq_len=length), RING) for length in (tokens, 2**16))
    assert (many.status, few.status) == ("oohm", "ok")
    assert many.device_bytes.keys() == few.device_bytes.keys()
    # Bytes are proportional to the tokens and grow with alpha, by at most a factor of 16 / 2.
    for kind in ("rounding_buffers", "transients"):
        assert many.device_bytes[kind] > tokens / 2**16 * few.device_bytes[kind] / 9


def test_one_device_has_its_link_to_itself() -> None:
    cluster = replace(load_cluster("h100"), host_bandwidth=60e9, host_bandwidth_shared=20e9, devices_per_node=8)
    assert [cluster.host_bandwidth_of(devices) for devices in (1, 2, 4, 8)] == [60e9, 60e9, 40e9, 20e9]
    asked = [(ask(cluster=cluster, gpus=gpus), Parallelism(cp=gpus)) for gpus in (1, 8, 16)]
    rates = [estimated_layer_costs(*each).offload_bytes_per_second for each in asked]
    assert rates == pytest.approx([rate * ask().constants.host_efficiency for rate in (60e9, 20e9, 20e9)])


def test_alpha_is_lowered_where_the_device_has_no_room() -> None:
    own = ask(cluster=replace(load_cluster("a800"), device_bytes=31 * 2**30), seq_len=2**18)
    lowered = estimate(own, RING)
    assert lowered.status == "ok" and lowered.alpha is not None and 0 < lowered.alpha < 1
    assert any(f"Device memory is the limit: above alpha={lowered.alpha:.4g} the" in limit for limit in lowered.limits)
    assert lowered.device_bytes["total"] < 31 * 2**30 * own.constants.device_share
    assert estimate(replace(own, alpha=1.0), RING).status == "oom"


def test_rings_use_the_network_where_they_leave_the_node() -> None:
    cluster = load_cluster("a800")
    assert ring_bandwidth(cluster, 8) == cluster.node_bandwidth
    assert ring_bandwidth(cluster, 2, stride=8) == cluster.network_bandwidth
    assert ring_bandwidth(cluster, 4, stride=4) == 2 * cluster.network_bandwidth


@pytest.mark.parametrize(("pp", "batch_size"), [(2, 8), (4, 16)])
def test_pipelines_of_this_package_wait_for_whole_stages_and_for_messages(pp: int, batch_size: int) -> None:
    request = ask(gpus=8 * pp, seq_len=64 * 1024, batch_size=batch_size, precision="bf16-true")
    answer = estimate(request, replace(RING, pp=pp))
    parts = step_parts(request, answer)
    assert sum(parts.values()) == pytest.approx(answer.step_seconds, rel=0.02)
    head = batch_size * outside_seconds(request, RING) + optimizer_seconds(request, replace(RING, pp=pp))
    layers = answer.step_seconds - head - parts["messages between pipeline stages"] - parts["data-parallel traffic"]
    bubble = (pp - 1) / (batch_size + pp - 1)
    assert parts["idle pipeline stages"] / layers == pytest.approx(bubble, rel=0.02)
    hidden_bytes = 64 * 1024 * 4096 * 2 / 8  # of a device
    least = 2 * (pp - 1) * hidden_bytes / request.cluster.node_bandwidth
    assert least < parts["messages between pipeline stages"] < 0.05 * answer.step_seconds
    (sentence,) = (limit for limit in answer.limits if "pipeline stages" in limit)
    assert f"is idle for {bubble:.0%}" in sentence and "sends 64.0 MiB to the next stage" in sentence
    assert not any("pipeline" in limit for limit in estimate(ask(), RING).limits)


@pytest.mark.parametrize("blocks", [2, 4])
def test_interleaved_pipelines_wait_less_send_more_and_need_more_of_the_host(blocks: int) -> None:
    request = ask(gpus=16, seq_len=64 * 1024, batch_size=8, precision="bf16-true", alpha=0.5)
    whole = estimate(request, replace(RING, pp=2))
    interleaved = estimate(request, replace(RING, pp=2, virtual_pipeline_size=blocks))
    parts, parts_of_whole = step_parts(request, interleaved), step_parts(request, whole)
    assert sum(parts.values()) == pytest.approx(interleaved.step_seconds, rel=0.02)
    idle, messages = "idle pipeline stages", "messages between pipeline stages"
    assert parts[idle] == pytest.approx(parts_of_whole[idle] / blocks, rel=0.01)
    assert parts[messages] == pytest.approx(parts_of_whole[messages] * (2 * blocks - 1))
    assert interleaved.host_bytes == pytest.approx(1.5 * whole.host_bytes, rel=0.01)
    assert any(f"{blocks} times and gets as much back" in limit for limit in interleaved.limits)


def test_stages_keep_inputs_and_outputs_of_micro_batches_in_flight() -> None:
    request = ask(seq_len=64 * 1024, precision="bf16-true")
    two, one_sequence, four = (
        estimated_layer_costs(
            replace(request, gpus=8 * stages, batch_size=size), replace(RING, pp=stages)
        ).transient_device_bytes
        for stages, size in ((2, 16), (2, 1), (4, 16))
    )
    assert one_sequence == two  # a stage has room for as many as there may be
    assert four - two >= 2 * 2 * 64 * 1024 * 4096 * 2 / 8


@pytest.mark.parametrize(
    ("stages", "micro_batches", "blocks", "idle"),
    [
        (4, 1, 1, 3),
        (4, 3, 1, 3),
        (4, 1, 4, 12),  # the other stages' 12 blocks
        (4, 2, 4, 9),  # 16 blocks of the first one, and one of the second one, but 8 of its own
        (4, 8, 2, 3),
        (4, 400, 4, 3),
    ],
)
def test_stages_wait_for_as_many_blocks_as_in_their_order(
    stages: int, micro_batches: int, blocks: int, idle: int
) -> None:
    assert idle_blocks(stages, micro_batches, blocks) == pytest.approx(idle)
    if micro_batches > stages:
        assert idle < idle_blocks(stages, micro_batches + 1, blocks) < blocks * idle


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_gradients_of_micro_batches_wait_whole_in_fp32(precision: Precision, zero_stage: int) -> None:
    """FSDP2 sums them in fp32. A stage of one process in one precision has no FSDP2, but plain gradients."""
    parallel = replace(RING, tp=2, cp=2, pp=2, zero_stage=zero_stage)
    request = ask(gpus=8, precision=precision, batch_size=8)
    state = device_state_bytes(request, parallel)
    weights = device_parameters(request.shape, parallel).total
    assert state.gradients == 4 * weights
    assert state.optimizer == request.element_bytes.optimizer * weights / (2 if zero_stage else 1)
    alone = device_state_bytes(request, replace(RING, cp=1, pp=2, zero_stage=0))
    weights = device_parameters(request.shape, replace(RING, cp=1, pp=2)).total
    assert alone.gradients == (2 if precision == "bf16-true" else 4) * weights
    assert alone.parameters == {"bf16-true": 2, "bf16-mixed": 4 + 2, "32-true": 4}[precision] * weights


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_zero2_and_3_add_up_shards_of_gradients_in_fp32(precision: Precision) -> None:
    parallel = replace(RING, tp=2, cp=2, pp=2, zero_stage=2)
    request = ask(gpus=8, precision=precision, batch_size=8)
    weights, sizes = device_parameters(request.shape, parallel).total, request.element_bytes
    two, three = (device_state_bytes(request, replace(parallel, zero_stage=stage)) for stage in (2, 3))
    assert two.gradients == three.gradients == 4 * weights / 2
    assert two.parameters == three.parameters + sizes.product * weights
    # ZeRO 2 has the gradients of one layer or of the head whole, ZeRO 3 also the weights of two layers, and the head's.
    of_head = sizes.product * request.shape.vocab * request.shape.hidden / 2
    of_layer = sizes.product * layer_weights(request.shape, parallel).total
    assert gathered_bytes(request, parallel) == max(of_head, of_layer)
    expected = max(3 * of_layer, of_head) + of_head
    assert gathered_bytes(request, replace(parallel, zero_stage=3)) == pytest.approx(expected)


def test_micro_batches_of_zero2_and_3_send_gradients_each() -> None:
    """So that a step takes longer where computation does not hide them."""
    cluster = replace(load_cluster("h100"), network_bandwidth=1e6)
    request = ask(gpus=16, batch_size=8, cluster=cluster, precision="bf16-true")
    parallel = replace(RING, cp=1, dp=8, tp=1, pp=2)
    once, each, again = (data_parallel_seconds(request, replace(parallel, zero_stage=s), 0.0) for s in (1, 2, 3))
    assert once == pytest.approx(each)  # one sequence for each process
    assert again > each
    more = replace(request, batch_size=32)
    reduced = (data_parallel_seconds(more, replace(parallel, zero_stage=2), 0.0) - each) / 3
    assert data_parallel_seconds(more, replace(parallel, zero_stage=1), 0.0) == once > reduced > 0
    assert data_parallel_seconds(more, replace(parallel, zero_stage=3), 0.0) == pytest.approx(4 * again)
    hidden = data_parallel_seconds(more, replace(parallel, zero_stage=2), 1e9)
    assert hidden == pytest.approx(each - reduced)  # the weights, which are gathered once


def test_pipelines_send_fewer_bytes_over_slow_networks() -> None:
    cluster = replace(load_cluster("h100"), network_bandwidth=1e8)
    request = ask(gpus=32, batch_size=32, cluster=cluster, precision="bf16-true")
    parallel = replace(RING, cp=1, dp=16, tp=1, pp=2, zero_stage=3)
    exact = data_parallel_seconds(request, parallel, 0.0)
    # A weight takes 2 bytes for the forward and for the backward, and its gradient 4.
    for changes, expected in (({"zero_communication": "int8"}, 3 / 8), ({"zero_communication": "int4"}, 2.5 / 8)):
        fewer = data_parallel_seconds(replace(request, **changes), parallel, 0.0)
        assert fewer / exact == pytest.approx(expected, rel=0.05)
    near = data_parallel_seconds(replace(request, zero_shard_size=8), parallel, 0.0)
    assert near / exact == pytest.approx(6 / 8, rel=0.05)


def test_pipelines_in_mixed_precision_take_the_time_of_bf16_and_more_memory() -> None:
    mixed, pure = (
        estimate(ask(gpus=16, precision=precision, batch_size=8, seq_len=64 * 1024), replace(RING, pp=2))
        for precision in ("bf16-mixed", "bf16-true")
    )
    assert mixed.step_seconds == pytest.approx(pure.step_seconds, rel=0.02)
    assert mixed.device_bytes["total"] > pure.device_bytes["total"]
    assert mixed.host_bytes == pure.host_bytes


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({}, replace(RING, dp=2, virtual_pipeline_size=2), "virtual_pipeline_size=2 is for pipelines"),
    ],
    ids=["blocks"],
)
def test_what_does_not_run_beside_a_pipeline_is_not_estimated(
    changes: dict[str, object], parallel: Parallelism, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        estimate(ask(gpus=16, **changes), parallel)
    assert "\n" not in str(caught.value)


def test_a_window_makes_attention_cheaper() -> None:
    shape = load_model("gpt_7b")
    whole, window = (
        layer_times(ask(shape=replace(shape, window=tokens)), RING).attention_forward for tokens in (None, 4096)
    )
    assert window == pytest.approx(whole * 2 * 4096 / 2**18, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({}, Parallelism(tp=2), "is 2 devices, but gpus=8"),
        ({"gpus": 3}, Parallelism(cp=3), "3 does not divide the sequence, 262144"),
        ({"alpha": 1.5}, RING, "alpha=1.5 must be from 0 to 1"),
        ({"alpha": 0.5, "method": "plain"}, RING, "alpha=0.5 has no effect with method=plain"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(
    changes: dict[str, object], parallel: Parallelism, message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")) as error:
        estimate(ask(**changes), parallel)
    assert "\n" not in str(error.value)


def test_constants_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(constants_of("h100"))))
    assert read_constants(path) == constants_of("h100") != constants_of("another") == constants_of("a100_80")
    wrong_fields = {
        "dense_efficiency=1.5": {"dense_efficiency": 1.5},
        "reads version 3; write it again with calibrate": {"version": 2},
    }
    for message, wrong in wrong_fields.items():
        path.write_text(json.dumps({**dataclasses.asdict(constants_of("h100")), **wrong}))
        with pytest.raises(ValueError, match=message) as error:
            read_constants(path)
        assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_constants_that_are_no_shares_are_refused() -> None:
    values = {**dataclasses.asdict(constants_of("a800")), "host_share": 0.0}
    with pytest.raises(ValueError, match=r"host_share=0\.0 must be above 0"):
        Constants(**values)


def test_a_precision_changes_time_and_memory() -> None:
    h100 = ask(cluster=load_cluster("h100"), constants=constants_of("h100"), seq_len=2**16)
    steps = {p: estimate(replace(h100, precision=p), RING) for p in ("bf16-mixed", "bf16-true", "32-true")}
    assert steps["32-true"].step_seconds > 1.5 * steps["bf16-true"].step_seconds
    assert steps["bf16-true"].device_bytes["optimizer"] * 2 == steps["bf16-mixed"].device_bytes["optimizer"]
    assert any("TF32" in limit for limit in steps["32-true"].limits)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("megatron", "method=megatron: programs of papers are not estimated; give method=full_recompute, which"),
        ("fpdt", "give method=memo slice_tokens=64K stream_from_host=hidden, which"),
        ("other", "method='other': give memo, full_recompute, selective_checkpointing, full_swap, plain"),
    ],
)
def test_other_methods_are_refused(method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ask(method=method)
    assert "\n" not in str(error.value)
