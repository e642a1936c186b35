"""Plans spill no more than necessary, fit the disk, and do not wait for it if possible."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.alpha_plans import alpha_swap, memory_by
from support.samples.plans import FINGERPRINT, GIB, costs_of

from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.slot_layouts import DiskLayout
from lightning_memo.planner import HostMemoryError, Restrictions, make_plan

CALLS = 12
FAST = 100.0 * GIB


def costs(write: float = FAST, read: float = FAST, copies: float = 2.0 * GIB) -> LayerCosts:
    """Twelve layers, ten of them swapped, 0.2 to 1.2 GiB each, forward 0.8 s, backward 1.5 s, recomputation 0.5 s."""
    return costs_of(
        CALLS,
        offload_bytes_per_second=copies,
        prefetch_bytes_per_second=copies,
        disk_write_bytes_per_second=write,
        disk_read_bytes_per_second=read,
    )


def plan(costs: LayerCosts, host: float, disk: float, alpha: float | str = "auto") -> Plan:
    budget = Budget(device_bytes=2**50, host_bytes=int(host * GIB), disk_bytes=int(disk * GIB))
    memory_of = memory_by(lambda fraction: costs.swapped_bytes(0, fraction), costs.swapped_calls)
    return make_plan(costs, budget, FINGERPRINT, Restrictions(alpha=alpha, may_be_plain=False), memory_of)


def test_a_disk_that_is_not_needed_changes_nothing() -> None:
    with_disk, without = plan(costs(), host=12.1, disk=100), plan(costs(), host=12.1, disk=0)
    assert with_disk.swap == without.swap and with_disk.swap.disk_calls == ()
    assert with_disk.step_seconds == without.step_seconds


def test_the_fewest_calls_go_to_the_disk() -> None:
    swap = plan(costs(), host=5, disk=100).swap
    assert swap.alpha == 1.0 and len(swap.disk_calls) == 7  # bounce buffers take a slot's place and a bit
    assert swap.host_bytes <= 5 * GIB < alpha_swap(1.0, swap.calls, swap.memory.slot, disk_calls=6).host_bytes
    assert swap.disk_bytes == 7 * DiskLayout(swap.memory.slot).region_bytes


def test_a_small_disk_limits_alpha() -> None:
    made = plan(costs(), host=4, disk=3)
    assert 0.0 < made.swap.alpha < 1.0 and made.swap.disk_calls
    assert made.swap.disk_bytes <= 3 * GIB
    assert "the budget of 4.0 GiB of host memory and 3.0 GiB of disk would overflow" in made.reason


def test_room_for_the_way_to_the_disk_limits_alpha() -> None:
    made = plan(costs(), host=1, disk=100)
    assert 0.0 < made.swap.alpha < 1.0 and len(made.swap.disk_calls) == 10
    assert made.reason.startswith(f"Host memory is the limit: above alpha={made.swap.alpha:.4g} the budget of 1.0 GiB")


def test_too_little_of_both_is_told() -> None:
    told = r"alpha=0 swaps 2\.0 GiB .* host memory, plus 819\.2 MiB of disk, .*: raise host_memory or disk_memory,"
    with pytest.raises(HostMemoryError, match=told):
        plan(costs(), host=0.8, disk=0.8)


def test_a_host_without_room_for_the_bounce_buffers_cannot_spill() -> None:
    """And a larger disk would not help."""
    with pytest.raises(HostMemoryError, match=r"of it: raise host_memory, or shorten the sequence$"):
        plan(costs(), host=0.1, disk=100)


@pytest.mark.parametrize(("write", "read"), [(0.5, 100.0), (100.0, 0.4)])
def test_a_slow_disk_limits_alpha(write: float, read: float) -> None:
    slow = costs(write * GIB, read * GIB)
    made = plan(slow, host=5, disk=100)
    assert 0.0 < made.swap.alpha < 1.0
    assert made.reason.startswith("Disk speed is the limit: above alpha=")
    others = (plan(slow, host=5, disk=100, alpha=count / slow.tokens) for count in range(0, slow.tokens + 1, 10))
    assert made.step_seconds <= min(other.step_seconds for other in others) * (1 + 1e-3)


def test_a_disk_that_is_too_slow_for_anything_still_makes_training_possible() -> None:
    with pytest.raises(HostMemoryError):
        plan(costs(), host=1.5, disk=0)
    made = plan(costs(write=0.01 * GIB), host=1.5, disk=100)
    assert made.swap.alpha == 0.0 and made.swap.disk_calls
    assert made.reason.startswith("Disk speed is the limit: above alpha=0 ")
    assert " for the disk." in made.reason
    assert made.step_seconds > made.swap.disk_bytes / (0.01 * GIB)


def test_a_given_alpha_is_taken_though_the_disk_is_slow() -> None:
    made = plan(costs(write=0.1 * GIB), host=5, disk=100, alpha=1.0)
    assert made.swap.alpha == 1.0 and " for the disk." in made.reason


@pytest.mark.slow
@settings(max_examples=100)
@given(host=st.floats(0.3, 14.0), disk=st.floats(0.1, 14.0), write=st.floats(0.05, 20.0), read=st.floats(0.05, 20.0))
def test_plans_fit_and_are_no_worse_than_without_a_disk(host: float, disk: float, write: float, read: float) -> None:
    measured = costs(write * GIB, read * GIB)
    try:
        without = plan(measured, host, 0.0).step_seconds
    except HostMemoryError:
        without = math.inf
    try:
        made = plan(measured, host, disk)
    except HostMemoryError:
        assert without == math.inf
        return
    assert made.swap.host_bytes <= made.budget.host_bytes and made.swap.disk_bytes <= made.budget.disk_bytes
    assert made.step_seconds <= without
    assert Plan.from_json(made.to_json()) == made
