from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.alpha_plans import memory_by
from support.samples.plans import FINGERPRINT, GIB, costs_of

from lightning_memo.artifacts.costs import OTHER, Budget
from lightning_memo.planner import HostMemoryError, Restrictions, make_plan

AMPLE = 2**50


def plan(costs, host_bytes=100 * GIB, device_bytes=None, alpha="auto", whole_layers=False, align=1):
    """A plan that is not plain, unless a device budget is given."""

    def slot_bytes(fraction):
        return -(-costs.swapped_bytes(0, fraction) // align) * align

    return make_plan(
        costs,
        Budget(device_bytes=AMPLE if device_bytes is None else device_bytes, host_bytes=host_bytes),
        FINGERPRINT,
        Restrictions(alpha=alpha, whole_layers=whole_layers, may_be_plain=device_bytes is not None),
        memory_by(slot_bytes, costs.swapped_calls),
    )


@st.composite
def problems(draw):
    n, exponent = draw(st.integers(1, 8)), draw(st.integers(4, 40))
    sizes = st.tuples(*[st.integers(0, 2**exponent)] * n)
    costs = costs_of(
        n,
        input_bytes=draw(sizes),
        attention_bytes=draw(sizes),
        other_bytes=draw(sizes),
        forward_seconds=draw(st.tuples(*[st.floats(0.0, 10.0)] * n)),
        offload_bytes_per_second=draw(st.floats(1.0, 2.0 ** (exponent + 2))),
        prefetch_bytes_per_second=draw(st.floats(1.0, 2.0 ** (exponent + 2))),
    )
    return costs, draw(st.integers(0, n * 2 ** (exponent + 2)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problems(), st.booleans())
def test_no_fraction_that_fits_is_faster(problem, whole_layers):
    costs, host_bytes = problem
    costs = replace(costs, tokens=50)

    def made(alpha):
        try:
            return plan(costs, host_bytes, alpha=alpha, whole_layers=whole_layers)
        except HostMemoryError:
            return None

    parts = costs.calls if whole_layers else costs.tokens
    others = [found for part in range(parts + 1) if (found := made(part / parts)) is not None]
    best = made("auto")
    assert (best is None) == (not others)
    if best is not None:
        assert best.swap.host_bytes <= host_bytes
        assert best.step_seconds <= min(found.step_seconds for found in others) * (1 + 1e-9)


@given(st.integers(12, 45))
@settings(max_examples=20)
def test_alpha_does_not_depend_on_the_unit(exponent):
    unit = 2.0 ** (exponent - 30)
    scaled = {
        name: tuple(int(size * unit) for size in getattr(costs_of(), name))
        for name in ("input_bytes", "attention_bytes", "other_bytes")
    }
    rate = GIB * unit
    costs = costs_of(**scaled, offload_bytes_per_second=rate, prefetch_bytes_per_second=rate)
    assert plan(costs, 2**60).swap.alpha == pytest.approx(0.6, abs=2e-3)


def test_copies_limit_alpha_in_either_direction():
    """Offloads overlap a forward of 0.8 s, prefetches a backward of 1.5 s with up to 0.5 s of recomputation."""
    assert plan(costs_of()).swap.alpha == pytest.approx(0.6)
    assert plan(costs_of()).reason.startswith("Copy time is the limit: above alpha=0.6 ")
    assert plan(costs_of(prefetch_bytes_per_second=GIB / 4)).swap.alpha == pytest.approx((2.0 - 0.8) / 4.5, abs=1e-3)
    assert plan(costs_of(offload_bytes_per_second=GIB / 2)).swap.alpha == pytest.approx(0.2)


def test_copies_longer_than_the_forward_are_worth_what_they_save():
    """1 GiB of a layer takes 1 s to copy, of which the forward hides 0.6 s, and 1.1 s to recompute."""
    made = plan(costs_of(recompute_seconds=(1.1,) * 6))
    assert made.swap.alpha == 1.0
    assert made.reason.startswith("Nothing limits alpha") and made.reason.endswith(" A step waits 1.60 s for copies.")


def test_the_host_limits_alpha_of_all_but_two_layers():
    made = plan(costs_of(n=6), host_bytes=4 * (2 * (GIB // 10) + GIB // 4))
    assert made.swap.alpha == pytest.approx(0.25)
    assert (
        made.reason == "Host memory is the limit: above alpha=0.25 the budget of 1.8 GiB of host memory would overflow."
    )


def test_all_tokens_are_swapped_where_nothing_limits():
    made = plan(costs_of(forward_seconds=(9.0,) * 6))
    assert made.swap.alpha == 1.0
    assert made.reason == "Nothing limits alpha: the activations of all tokens are swapped."


def test_two_layers_have_nothing_to_swap():
    made = plan(costs_of(n=2, forward_seconds=(0.0, 0.0)), host_bytes=0)
    assert (made.swap.alpha, made.swap.host_bytes) == (1.0, 0)
    assert "there are no others" in made.reason


def test_copies_that_cannot_be_hidden_are_said_so():
    made = plan(costs_of(forward_seconds=(0.1,) * 6))
    assert made.swap.alpha == 0.0
    assert made.reason == (
        "Copy time is the limit: above alpha=0 a step would wait longer than recomputation takes. "
        "A step waits 400.0 ms for copies."
    )


def test_a_reason_names_one_limit():
    slow = costs_of(forward_seconds=(0.1,) * 6)
    made = plan(slow, device_bytes=plan(slow, alpha=0.0).device_bytes - 1)
    assert made.reason.startswith("Device memory is the limit: even alpha=0 exceeds the ")
    assert made.reason.endswith(" A step waits 400.0 ms for copies.")


def test_a_host_too_small_is_refused_in_one_line():
    with pytest.raises(HostMemoryError) as caught:
        plan(costs_of(), host_bytes=GIB // 2)
    text = str(caught.value)
    assert text.startswith("alpha=0 swaps 819.2 MiB")
    assert f"({GIB // 2} bytes) of host memory: raise host_memory" in text
    assert "\n" not in text


def test_ample_device_memory_means_plain_training():
    costs = costs_of()
    needed = costs.fixed_device_bytes + costs.transient_device_bytes + costs.skeletal_bytes
    made = plan(costs, device_bytes=needed)
    assert (made.swap.plain, made.swap.alpha, made.swap.host_bytes, made.swap.memory.slot) == (True, 0.0, 0, 0)
    assert made.reason.startswith("Plain training needs 10.2 GiB of 10.2 GiB")
    assert made.step_seconds == pytest.approx(6 * (0.8 + 1.5) + 2.0)
    assert not plan(costs, device_bytes=needed - 1).swap.plain


def test_a_given_alpha_is_taken_even_where_memory_is_ample():
    made = plan(costs_of(), device_bytes=2**50, alpha=1)
    assert (made.swap.plain, made.swap.alpha) == (False, 1.0)
    assert made.reason == "You set alpha=1. A step waits 1.60 s for copies."
    hidden = "You set alpha=0.5. Its copies hide behind the computation."
    assert plan(costs_of(), alpha=0.5).reason == hidden
    assert plan(costs_of(), alpha=0.5, device_bytes=GIB).reason == (
        f"{hidden} Device memory is short: alpha=0.5 exceeds the 1.0 GiB budget."
    )


def test_a_given_alpha_must_fit_the_host():
    with pytest.raises(HostMemoryError, match=r'^alpha=0.9 swaps .*: set a smaller alpha or alpha="auto"'):
        plan(costs_of(), host_bytes=4 * GIB, alpha=0.9)


@pytest.mark.parametrize(
    ("alpha", "swapped", "host"), [(0.0, [], 0), (0.3, [0, 3], 2), (0.5, [0, 2, 4], 2), (0.9, [0, 2, 3, 4, 5], 3)]
)
def test_a_fraction_of_whole_layers(alpha, swapped, host):
    """A given fraction is that of the nearest number of layer calls, which are evenly spread."""
    costs = costs_of()
    made = plan(costs, alpha=alpha, whole_layers=True)
    least, most = costs.swapped_bytes(0, 0.0), costs.swapped_bytes(0, 1.0)
    assert made.swap.alpha == len(swapped) / 6
    assert [call for call in range(6) if made.swap.storage.call(call).tokens(OTHER)] == swapped
    assert made.swap.host_bytes == host * most + (4 - host) * least  # the last two calls stay on the device
    assert made.swap.memory.slot == (most if swapped else least)


@pytest.mark.parametrize("forward_seconds", [0.1, 0.5, 0.6, 0.7, 0.8, 2.0])
def test_the_best_fraction_of_whole_layers(forward_seconds):
    costs = costs_of(forward_seconds=(forward_seconds,) * 6)
    made = plan(costs, whole_layers=True)
    others = [plan(costs, alpha=part / 6, whole_layers=True).step_seconds for part in range(7)]
    assert made.step_seconds == pytest.approx(min(others), rel=1e-9)
    assert (len(made.swap.storage.calls) == 2) == (0.0 < made.swap.alpha < 1.0)


@settings(max_examples=100)
@given(host_bytes=st.integers(4 * GIB // 5, 6 * GIB))
def test_whole_layers_keep_the_host_budget_and_use_it_up(host_bytes):
    costs = costs_of(forward_seconds=(9.0,) * 6)
    made = plan(costs, host_bytes=host_bytes, whole_layers=True)
    assert made.swap.host_bytes <= host_bytes
    if made.swap.alpha < 1.0:
        # One more may be among the last two, which stay on the device.
        more = plan(costs, alpha=min(made.swap.alpha + 2 / 6, 1.0), whole_layers=True)
        assert more.swap.host_bytes > host_bytes


@settings(max_examples=100)
@given(host_bytes=st.integers(4 * GIB // 5, 6 * GIB), align=st.sampled_from([1, 512, 2**21, 2**28]))
def test_the_host_budget_is_kept_to_the_byte_and_used_up(host_bytes, align):
    costs = costs_of(forward_seconds=(9.0,) * 6)

    def slots(fraction):
        return 4 * (-(-costs.swapped_bytes(0, fraction) // align) * align)

    if slots(0.0) > host_bytes:
        with pytest.raises(HostMemoryError):
            plan(costs, host_bytes=host_bytes, align=align)
        return
    made = plan(costs, host_bytes=host_bytes, align=align)
    assert made.swap.host_bytes == slots(made.swap.alpha) <= host_bytes
    token = 1 / costs.tokens
    assert made.swap.alpha == 1.0 or slots(made.swap.alpha + 2 * token) > host_bytes


def test_alignment_lowers_alpha():
    costs = costs_of(forward_seconds=(9.0,) * 6)
    made = plan(costs, host_bytes=4 * (costs.swapped_bytes(0, 0.5)), align=2**28)
    assert made.swap.alpha == pytest.approx(0.3, abs=1e-3)  # two aligned blocks of 256 MiB, 20 % of 1 GiB of them fixed
    assert made.reason.startswith("Host memory is the limit: above alpha=0.3 the budget")


def test_one_cold_layer_does_not_decide():
    cold = costs_of(forward_seconds=(30.0, 0.8, 0.8, 0.8, 0.8, 0.8), backward_seconds=(1.5,) * 5 + (40.0,))
    assert plan(cold) == replace(plan(costs_of()), costs=cold)


@pytest.mark.parametrize("whole_layers", [False, True])
@pytest.mark.parametrize("align", [1, 2**24])
def test_auto_takes_what_the_device_has_room_for(align, whole_layers):
    """At every budget, the plan fits if alpha 0 does, and one more token, or layer call, would not fit."""
    costs = costs_of(offload_bytes_per_second=4.0 * GIB, prefetch_bytes_per_second=4.0 * GIB)
    least, most = (plan(costs, alpha=alpha, align=align).device_bytes for alpha in (0.0, 1.0))
    taken = []
    for device_bytes in range(least - 2**28, most + 2**28, 2**26 + 1):
        made = plan(costs, device_bytes=device_bytes, align=align, whole_layers=whole_layers)
        taken.append(made.swap.alpha)
        if device_bytes < least:
            assert (made.swap.alpha, made.device_excess_bytes) == (0.0, least - device_bytes)
            continue
        assert made.device_excess_bytes == 0
        if made.swap.alpha == 1.0:
            continue
        more = made.swap.alpha + 1 / (costs.calls if whole_layers else costs.tokens)
        needed = plan(costs, device_bytes=device_bytes, alpha=more, align=align, whole_layers=whole_layers)
        assert needed.device_excess_bytes > 0
        assert made.reason.startswith("Device memory is the limit: ")
    assert taken == sorted(taken) and taken[-1] == 1.0


def test_layers_of_other_sizes_keep_their_own_times():
    costs = costs_of(other_bytes=(GIB // 2,) + (GIB,) * 5, forward_seconds=(0.4,) + (0.8,) * 5)
    assert plan(costs, alpha=0.0).step_seconds == pytest.approx(0.4 + 5 * 0.8 + 6 * (1.5 + 0.5) + 2.0)
    assert plan(costs).swap.alpha == 0.6  # a larger one would make no step shorter, and copy more


def test_the_expected_step_takes_the_longer_of_compute_and_copy():
    made = plan(costs_of(offload_bytes_per_second=GIB / 2), alpha=1.0)
    swapped_gib = 1.0 + 2 * (GIB // 10) / GIB
    forward = 4 * 2 * swapped_gib + 2 * 0.8
    backward = 6 * 1.5  # a prefetch of 1.2 s hides
    assert made.step_seconds == pytest.approx(forward + backward + 2.0)
    half = plan(costs_of(), alpha=0.5)
    assert half.step_seconds == pytest.approx(6 * 0.8 + 6 * (1.5 + 0.25) + 2.0)


def test_the_plan_holds_what_was_asked_for():
    made = plan(costs_of(), host_bytes=50 * GIB)
    assert made.fingerprint == FINGERPRINT
    assert made.costs == costs_of()
    assert made.budget == Budget(device_bytes=AMPLE, host_bytes=50 * GIB)
    assert (made.swap.joint_attention, made.swap.storage.slice_tokens, made.swap.calls) == (False, None, 6)
    assert made.swap.alpha == 0.6
