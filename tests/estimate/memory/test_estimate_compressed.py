"""Estimates with `swap_precision="fp8"`: fewer bytes on the host and on the way there, time to compress, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_memo.estimate.cluster import constants_of, load_cluster, load_model
from lightning_memo.estimate.planner_inputs import estimated_layer_costs
from lightning_memo.estimate.request import EstimateRequest, Parallelism, check_request
from lightning_memo.estimate.saved_tensors import layer_activations
from lightning_memo.estimate.slice_settings import Slices
from lightning_memo.estimate.step_estimate import estimate


def ask(precision: str = "fp8", **changes: Any) -> EstimateRequest:
    request = EstimateRequest(
        shape=load_model("llama3_2_1b"),
        cluster=load_cluster("h100"),
        constants=constants_of("h100"),
        method="memo",
        gpus=1,
        seq_len=2**17,
        batch_size=1,
        precision="bf16-true",
        swap_precision=precision,  # type: ignore[arg-type]
    )
    return replace(request, **changes)


def test_bytes_of_a_layer() -> None:
    """In bf16 half of everything is left, apart from input, queries, keys, values, attention output, and statistics."""
    request = ask()
    shape, sizes = request.shape, request.element_bytes
    kept = layer_activations(shape, sizes=sizes)
    of_attention = 2 * (shape.hidden + 2 * shape.kv_heads * shape.head_dim)
    statistics = kept.others - kept.compressible - of_attention
    assert 0 < statistics < 0.01 * kept.others
    in_fp32 = 2 * 4 * shape.hidden  # the norms of Llama
    values = (kept.compressible - in_fp32) / 2 + in_fp32 / 4
    assert kept.compressed == pytest.approx(values * (1 + 2 / 128), rel=1e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_less_host_memory_and_shorter_copies(alpha: float) -> None:
    exact, compressed = (estimate(ask(precision, alpha=alpha), Parallelism()) for precision in ("exact", "fp8"))
    assert exact.step_seconds is not None and compressed.step_seconds is not None
    if alpha == 0.0:
        assert (compressed.host_bytes, compressed.step_seconds) == (exact.host_bytes, exact.step_seconds)
        return
    costs = estimated_layer_costs(ask(), Parallelism())
    assert costs.swapped_other_bytes is not None
    layers = costs.calls - 2
    saved = alpha * (costs.other_bytes[0] - costs.swapped_other_bytes[0])
    assert exact.host_bytes - compressed.host_bytes == pytest.approx(layers * saved, rel=1e-3)
    assert exact.device_bytes["rounding_buffers"] - compressed.device_bytes["rounding_buffers"] == pytest.approx(
        2 * saved, rel=1e-3
    )


def test_it_pays_on_slow_links() -> None:
    """With alpha 1, the copies of a slow link decide, and with a fast one the time to compress and restore."""
    slow, fast = (replace(load_cluster("h100"), host_bandwidth=rate) for rate in (1e10, 1e13))
    for cluster, better in ((slow, "fp8"), (fast, "exact")):
        seconds = {
            p: estimate(ask(p, cluster=cluster, alpha=1.0), Parallelism()).step_seconds for p in ("exact", "fp8")
        }
        assert min(seconds, key=lambda precision: seconds[precision] or 0) == better
    costs = estimated_layer_costs(ask(cluster=fast), Parallelism())
    assert costs.compress_seconds is not None and costs.restore_seconds is not None
    both = [estimate(ask(p, cluster=fast, alpha=1.0), Parallelism()).step_seconds or 0 for p in ("exact", "fp8")]
    assert both[1] - both[0] == pytest.approx(sum(costs.compress_seconds) + sum(costs.restore_seconds), rel=1e-3)


@pytest.mark.parametrize("alpha", [None, 0.75])
def test_slices_on_the_host(alpha: float | None) -> None:
    slices = Slices(tokens=2**14)
    exact, compressed = (estimate(ask(p, slices=slices, alpha=alpha), Parallelism()) for p in ("exact", "fp8"))
    assert exact.status == compressed.status == "ok"
    assert exact.alpha is not None and compressed.alpha is not None
    if alpha is not None:
        assert compressed.host_bytes < exact.host_bytes


def test_where_it_is_not_estimated() -> None:
    for method in ("full_recompute", "plain"):
        with pytest.raises(ValueError, match="swap_precision=fp8 is estimated for methods that swap: leave it out"):
            check_request(ask(method=method))
