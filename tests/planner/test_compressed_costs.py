"""Plans of activations that are swapped compressed: fewer bytes to move and to hold, and seconds to compress them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.alpha_plans import memory_by
from support.samples.plans import FINGERPRINT, GIB, costs_of
from support.samples.storage_problems import COSTS, TOKENS

from lightning_memo.artifacts.costs import OTHER, Budget, LayerCosts, StorageCosts
from lightning_memo.artifacts.plan import DiskTier, Plan, StorageBudget
from lightning_memo.artifacts.slot_layouts import compressed_bytes
from lightning_memo.planner import plan_swap, solve_alpha
from lightning_memo.planner.simulate_step import simulate
from lightning_memo.planner.storage_planner import plan_storage
from lightning_memo.planner.token_slices import (
    RECOMPUTED,
    SWAPPED,
    SavedBytes,
    TokenRange,
    aligned,
    in_slot,
    slot_bytes,
)

LAYERS = 6
AMPLE = Budget(device_bytes=0, host_bytes=100 * GIB)


def compressed(moved: float, compress: float = 0.0, restore: float = 0.0) -> LayerCosts:
    """Return costs of which a share of S_others is moved; exact ones have alpha 0.6, limited by copies."""
    return costs_of(
        LAYERS, swapped_other_bytes=(int(moved * GIB),) * LAYERS, compress_seconds=(compress,) * LAYERS,
        restore_seconds=(restore,) * LAYERS,
    )  # fmt: skip


def plan(costs: LayerCosts, host_bytes: int = 100 * GIB, device_bytes: int = 2**50) -> Plan:
    return plan_swap(
        costs, Budget(device_bytes=device_bytes, host_bytes=host_bytes), FINGERPRINT, alpha="auto", schedule="layer",
        slice_tokens=None, may_be_plain=False,
        memory_of=memory_by(lambda alpha: costs.swapped_bytes(0, alpha), costs.swapped_calls),
    )  # fmt: skip


def test_fewer_bytes_allow_a_larger_alpha() -> None:
    """0.2 GiB of inputs and attention leave 0.6 s of a copy of 1 GiB/s; compression takes 0.1 s more of the forward."""
    assert solve_alpha(costs_of(LAYERS), AMPLE).alpha == pytest.approx(0.6, abs=1e-3)
    assert solve_alpha(compressed(0.8), AMPLE).alpha == pytest.approx(0.6 / 0.8, abs=1e-3)
    assert solve_alpha(compressed(0.8, compress=0.1), AMPLE).alpha == pytest.approx(0.6 / 0.7, abs=1e-3)
    assert solve_alpha(compressed(0.5), AMPLE).binding == "all tokens swapped"


def test_the_host_holds_compressed_bytes() -> None:
    host = Budget(device_bytes=0, host_bytes=4 * (2 * GIB // 10) + GIB)
    assert solve_alpha(costs_of(LAYERS), host).alpha == pytest.approx(0.25, abs=1e-6)
    assert solve_alpha(compressed(0.5), host).alpha == pytest.approx(0.5, abs=1e-6)


def test_what_is_recomputed_faster_is_not_compressed() -> None:
    """Recomputation takes 0.5 s."""
    assert plan(compressed(0.5, compress=0.2, restore=0.29)).swap.alpha == 1.0
    slow = plan(compressed(0.5, compress=0.2, restore=0.31))
    assert slow.swap.alpha == 0.0
    assert slow.reason.startswith("Recomputation is faster than to compress and restore activations")


def test_the_expected_step() -> None:
    costs = compressed(0.5, compress=0.1, restore=0.05)
    found = plan(costs)
    assert found.swap.alpha == 1.0
    assert found.step_seconds == pytest.approx(2.0 + LAYERS * (0.8 + 0.1 + 1.5 + 0.05))
    exact = plan(replace(costs, swapped_other_bytes=None, compress_seconds=None, restore_seconds=None))
    assert exact.step_seconds == pytest.approx(2.0 + LAYERS * (0.8 + 1.5 + 0.4 * 0.5), rel=1e-3)


@pytest.mark.parametrize("moved", [0.25, 0.6])
def test_a_device_that_holds_buffers_but_not_recomputed_tensors(moved: float) -> None:
    """With a quarter of the bytes, two buffers for all tokens are smaller than the tensors that alpha 0 recomputes."""
    costs = replace(compressed(moved), backward_device_bytes=GIB)
    at_one = plan(costs).device_bytes
    at_zero = costs.fixed_device_bytes + costs.working_bytes(1.0) + 2 * costs.swapped_bytes(0, 0.0)
    assert (at_one < at_zero) == (moved == 0.25)
    least = min(at_one, at_zero)
    found = plan(costs, device_bytes=least)
    assert found.device_bytes <= least
    assert (found.swap.alpha == 1.0) == (moved == 0.25)


@given(st.integers(1, 5000), st.integers(1, 97), st.sampled_from([2, 4, 8]), st.data())
def test_slots_hold_compressed_tensors_cut_anywhere(values: int, tokens: int, size: int, data: st.DataObject) -> None:
    """A tensor with some values per token is measured for all tokens, and stored for a part."""
    item = SavedBytes("other", values * tokens * size, True, compressed_bytes(values * tokens, size))
    part = data.draw(st.integers(1, tokens))
    assert in_slot(item, part, tokens) >= aligned(compressed_bytes(values * part, size))
    slices = (TokenRange(0, part, SWAPPED), TokenRange(part, tokens, RECOMPUTED))
    assert slot_bytes([item], tokens, slices, "layer") == in_slot(item, part, tokens)
    exact = SavedBytes("other", item.size_bytes)
    assert in_slot(exact, part, tokens) == aligned(values * part * size)


def with_compression(share: float, compress: float, restore: float) -> StorageCosts:
    (call,) = COSTS.classes
    moved = int(share * call.other_bytes)
    return replace(
        COSTS,
        classes=(replace(call, swapped_other_bytes=moved, compress_seconds=compress, restore_seconds=restore),),
    )


BUDGETS = st.builds(
    lambda device, host, disk: StorageBudget(
        device_bytes=COSTS.fixed_device_bytes + COSTS.transient_device_bytes + device * TOKENS,
        host_bytes=host * TOKENS,
        disk_bytes=2**40 if disk else 0,
        disk=DiskTier(capacity_bytes=2**40, write_bytes_per_second=1e8, read_bytes_per_second=1e8) if disk else None,
    ),
    st.integers(20_000, 200_000), st.integers(20_000, 200_000), st.booleans(),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(BUDGETS, st.floats(0.25, 1.0), st.floats(0.0, 0.02), st.floats(0.0, 0.02))
def test_plans_by_kind_keep_their_promises(
    budget: StorageBudget, share: float, compress: float, restore: float
) -> None:
    """The simulation, which shares no code with the planner, needs no more time and memory than the plan says."""
    costs = with_compression(share, compress, restore)
    found = plan_storage(costs, budget)
    step = simulate(costs, found, budget)
    assert step.step_seconds == pytest.approx(found.needs.step_seconds, rel=1e-6)
    assert step.peak_host_bytes <= found.needs.host_bytes <= budget.host_bytes
    assert step.peak_device_bytes <= found.needs.device_bytes <= budget.device_bytes
    assert found.bound_seconds <= found.needs.step_seconds * (1 + 1e-6)


@settings(max_examples=25, deadline=None)
@given(BUDGETS, st.floats(0.25, 1.0))
def test_compression_that_takes_no_time_makes_no_step_longer(budget: StorageBudget, share: float) -> None:
    exact, free = plan_storage(COSTS, budget), plan_storage(with_compression(share, 0.0, 0.0), budget)
    assert free.bound_seconds <= exact.bound_seconds * (1 + 1e-6)


@settings(max_examples=25, deadline=None)
@given(BUDGETS)
def test_compression_that_takes_too_long_is_not_used(budget: StorageBudget) -> None:
    (call,) = COSTS.classes
    longer = call.recompute_seconds + call.attention_seconds
    (stored,) = plan_storage(with_compression(0.5, 2 * longer, 0.0), budget).calls
    assert stored.tokens(OTHER, "host", "disk") <= 0.02 * TOKENS  # where a copy would be waited for
