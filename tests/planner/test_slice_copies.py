"""Alpha where every slice swaps by itself: slices wait for copies that whole layers would hide."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples.plans import FINGERPRINT, GIB, costs_of

from lightning_memo.artifacts.costs import Budget, StorageCosts
from lightning_memo.planner import Restrictions, make_plan
from lightning_memo.planner.step_time import layer_seconds, slice_work, streamed_step_time
from lightning_memo.planner.streamed_bytes import SliceBytes, streamed_bytes
from lightning_memo.planner.token_slices import SavedBytes, slices_of

AMPLE = Budget(device_bytes=2**50, host_bytes=2**50)
SAVED = [SavedBytes("input", GIB // 10), SavedBytes("out", GIB // 10), SavedBytes("other", GIB)]


def sizes(*slots, swapped=True):
    return tuple(SliceBytes(tokens=10, slot=slot, swapped=swapped) for slot in slots)


def costs(**changes):
    """A layer of 4 s forward and 8 s backward, all of it local to tokens, and copies of 1 byte per second."""
    times = {"forward_seconds": (4.0,) * 4, "backward_seconds": (8.0,) * 4, "recompute_seconds": (4.0,) * 4}
    rates = {"offload_bytes_per_second": 1.0, "prefetch_bytes_per_second": 1.0}
    return StorageCosts.of_layers(costs_of(4, **{**times, **rates, **changes}))


def seconds(costs, slices, by_slice=False):
    return layer_seconds(slice_work(costs, costs.classes[0], slices), by_slice)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (sizes(1, 1, 1, 1), (4.0, 8.0)),  # copies hide
        (sizes(3, 3, 3, 3), (12.0, 12.0)),  # only copies are left
        # Forward: the third slice waits from 2 to 4 for a buffer, the fourth from 5 to 7, behind the copies before.
        # Backward: the third from 2 to 3 for its copy, which follows the last slice but one, the fourth from 5 to 6.
        (sizes(3, 3, 0, 0), (8.0, 10.0)),
        (sizes(0, 0, 0, 0, swapped=False), (4.0, 12.0)),
    ],
)
def test_a_slice_waits_until_a_buffer_is_free(given, expected):
    assert seconds(costs(), given) == pytest.approx(expected)


def test_slices_of_the_whole_model_wait_for_slices_of_their_own_length():
    """The first slice's copies cannot hide under the last one's attention in another layer."""
    quadratic = costs(recompute_seconds=(0.0,) * 4)  # 1, 3, 5 and 7 sixteenths of 4 s
    assert seconds(quadratic, sizes(1, 1, 1, 1), True)[0] == pytest.approx(1.0 + 1.0 + 1.25 + 1.75)
    # The second slice waits 0.75 s for the copy of the last one of the layer before, and the third 0.25 s.
    assert seconds(quadratic, sizes(1, 1, 1, 1))[0] == pytest.approx(5.0)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.integers(1, 40),
    st.floats(0.01, 4.0),
    st.floats(0.0, 1.0),
    st.floats(2.0**20, 2.0**36),
    st.sampled_from(["attention", "hidden", "model"]),
)
def test_the_best_alpha_is_not_slower_than_none_half_and_all(slices, forward, local, rate, stream_from_host):
    times = {"forward_seconds": (forward,) * 6, "recompute_seconds": (local * forward,) * 6}
    layers = costs_of(6, **times, offload_bytes_per_second=rate, prefetch_bytes_per_second=rate)

    def streamed(plan):
        parts = slices_of(plan, 0, 1000)
        return streamed_bytes([(SAVED, 1000)] * 6, parts, stream_from_host, gradient_bytes=0)

    def at(alpha):
        restrictions = Restrictions(
            alpha=alpha,
            slice_tokens=-(-1000 // slices),
            may_be_plain=False,
            stream_from_host=stream_from_host,
        )
        return make_plan(layers, AMPLE, FINGERPRINT, restrictions, streamed)

    best = at("auto")
    slices_of_best = streamed(best.swap.storage).slices
    time = streamed_step_time(StorageCosts.of_layers(layers), slices_of_best, stream_from_host == "model")
    assert best.step_seconds == time.seconds
    assert all(best.step_seconds <= at(alpha).step_seconds * (1 + 1e-9) for alpha in (0.0, 0.504, 1.0))
    computing = sum(layers.forward_seconds) + sum(layers.backward_seconds)
    assert best.step_seconds >= layers.outside_seconds + computing - 1e-9
