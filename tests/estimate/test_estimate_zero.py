"""Estimates of ZeRO that sends integers, and of shards within a node."""

from dataclasses import replace

import pytest

from lightning_memo.estimate.cluster import constants_of, load_cluster, load_model
from lightning_memo.estimate.request import EstimateRequest, Parallelism
from lightning_memo.estimate.step_estimate import estimate
from lightning_memo.estimate.step_times import data_parallel_seconds, ring_bandwidth


def ask(**changes: object) -> EstimateRequest:
    request = EstimateRequest(
        shape=load_model("gpt_7b"),
        cluster=load_cluster("h100"),
        constants=constants_of("h100"),
        method="memo",
        gpus=16,
        seq_len=2**13,
        batch_size=16,
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def test_quantised_communication_sends_less_and_moves_more() -> None:
    """Weights with 8 bits and a scale for each 128, gradients with 8 or 4: what is sent decides on a slow network."""
    request = ask(precision="bf16-true")
    parallel, count = Parallelism(dp=16, zero_stage=1), request.shape.parameters
    for bandwidth in (1e9, 1e12):
        slow = replace(request, cluster=replace(request.cluster, network_bandwidth=bandwidth))
        exact, *quantised = (
            data_parallel_seconds(replace(slow, zero_communication=sent), parallel, 0.0)
            for sent in ("none", "int8", "int4")
        )
        for bits, seconds in zip((8, 4), quantised, strict=True):
            fewer = (2 + 4) - (1 + 4 / 128 + bits / 8 + 4 / 128)  # bytes of bf16 weights and fp32 gradients
            moved = 25 / 16 + 3 + 25 + 9
            saved = count * 15 / 16 * fewer / ring_bandwidth(slow.cluster, 16, 1)
            spent = count * moved / (slow.cluster.memory_bandwidth * slow.constants.memory_efficiency)
            assert exact - seconds == pytest.approx(saved - spent, rel=1e-6)
            assert (seconds < exact) == (bandwidth == 1e9)


def test_buffers_of_quantised_communication_take_memory() -> None:
    request, parallel = ask(gpus=16), Parallelism(dp=16, zero_stage=3)
    exact, eight, four = (
        estimate(replace(request, zero_communication=sent), parallel).device_bytes["gathered"]
        for sent in ("none", "int8", "int4")
    )
    largest = max(request.shape.layer_parameters, request.shape.vocab * request.shape.hidden)
    assert (eight - exact) / largest == pytest.approx(1 + 2 + 4 / 128, rel=0.01)
    assert (four - exact) / largest == pytest.approx(1 + 1 + 4 / 128, rel=0.01)


def test_where_quantised_communication_is_not_estimated() -> None:
    request = ask(zero_communication="int8")
    with pytest.raises(ValueError, match="zero_communication=int8 needs shards: zero_stage must be 1, 2 or 3"):
        estimate(request, Parallelism(dp=16))


def test_weights_for_the_backward_come_from_the_node() -> None:
    request = ask(precision="bf16-true")
    request = replace(request, cluster=replace(request.cluster, network_bandwidth=1e9))
    parallel, count = Parallelism(dp=16, zero_stage=3), request.shape.parameters
    near = replace(request, zero_shard_size=8)
    saved = data_parallel_seconds(request, parallel, 0.0) - data_parallel_seconds(near, parallel, 0.0)
    far_seconds, near_seconds = (2 * count * (n - 1) / n / ring_bandwidth(request.cluster, n, 1) for n in (16, 8))
    assert saved == pytest.approx(far_seconds - near_seconds, rel=1e-5) and near_seconds < far_seconds / 50
    more = estimate(near, parallel).device_bytes["gathered"] - estimate(request, parallel).device_bytes["gathered"]
    assert more == pytest.approx(2 * request.shape.layers * request.shape.layer_parameters / 8, rel=1e-3)
    with pytest.raises(ValueError, match="zero_shard_size=5 does not divide dp x cp = 16"):
        estimate(replace(near, zero_shard_size=5), parallel)
    with pytest.raises(ValueError, match="zero_shard_size=8 is for weights that are gathered again: zero_stage"):
        estimate(near, Parallelism(dp=16, zero_stage=1))
