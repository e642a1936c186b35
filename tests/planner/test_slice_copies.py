"""Alpha where every slice swaps by itself: slices wait for copies that whole layers would hide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples.plans import FINGERPRINT, GIB, costs_of

from lightning_memo.artifacts.costs import Budget, StorageCosts
from lightning_memo.artifacts.plan import Plan
from lightning_memo.planner import HostMemoryError, Restrictions, make_plan
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


# ---- layer calls that run again


def planned(host_bytes, calls=12, **changes):
    """A plan for slots of 2 GiB a call, of which the input is 1 GiB. Hidden states take as much."""
    saved = [SavedBytes("input", GIB), SavedBytes("out", GIB), SavedBytes("other", GIB)]
    layers = costs_of(calls, offload_bytes_per_second=1e15, prefetch_bytes_per_second=1e15)

    def streamed(plan):
        parts = slices_of(plan, 0, 1000)
        return streamed_bytes([(saved, 1000)] * calls, parts, "hidden", gradient_bytes=0, segments=plan.segments)

    limits = {"may_run_again": True, "may_be_plain": False, "slice_tokens": 250, "stream_from_host": "hidden"}
    budget = Budget(device_bytes=2**50, host_bytes=int(host_bytes))
    return make_plan(layers, budget, FINGERPRINT, Restrictions(**limits | changes), streamed)


@pytest.mark.parametrize(
    ("gib", "again", "segment_calls"),
    [  # three hidden states, the inputs of the segments that run again, and the slots of one segment
        (3 + 0 + 24, 0, None),
        (3 + 1 + 22, 1, 11),
        (3 + 1 + 12, 6, 6),
        (3 + 2 + 8, 8, 4),
        (3 + 3 + 6, 9, 3),
        (3 + 5 + 4, 9, 3),  # shorter ones would need more inputs
        (3 + 5 + 4 - 1, None, None),
    ],
)
def test_as_few_calls_as_the_host_allows_run_again(gib, again, segment_calls):
    bytes_of_host = gib * GIB * 1.01
    if again is None:
        with pytest.raises(HostMemoryError, match="alpha=0 swaps"):
            planned(bytes_of_host)
        return
    plan = planned(bytes_of_host)
    storage = plan.swap.storage
    assert (storage.calls_again, storage.segment_calls) == (again, segment_calls)
    assert plan.swap.host_bytes <= bytes_of_host
    told = "run again in the backward, attention included" in plan.reason
    assert told == bool(again) and (again == 0 or plan.swap.alpha == 0.0)
    assert Plan.from_json(plan.to_json()) == plan
    once = planned(2**50, alpha=0.0)
    if again:
        assert plan.step_seconds - once.step_seconds == pytest.approx(0.8 * again)
        with pytest.raises(HostMemoryError):
            planned(bytes_of_host, may_run_again=False)


def test_segments_of_a_size_that_other_processes_need():
    plan = planned(2**50, segment_calls=4)
    assert (plan.swap.storage.segment_calls, plan.swap.alpha) == (4, 0.0)
    with pytest.raises(HostMemoryError):
        planned(10 * GIB, segment_calls=4)


def test_segments_are_counted_from_the_last_call():
    storage = planned(2**50, calls=11, segment_calls=4).swap.storage
    assert storage.segments == [range(3), range(3, 7), range(7, 11)]
    assert [storage.segments_behind(n) for n in range(13)] == [2] * 3 + [1] * 4 + [0] * 6


@pytest.mark.parametrize("changes", [{"stream_from_host": "attention"}, {"stream_from_host": "none"}])
def test_segments_need_hidden_states_on_the_host(changes):
    swap = planned(2**50, segment_calls=4).swap
    with pytest.raises(ValueError, match="segment_calls must be null unless stream_from_host is hidden and alpha is 0"):
        replace(swap, **changes)
