"""Which of two plans is chosen, and when plain training is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.alpha_plans import alpha_swap, memory_by
from support.samples.storage_problems import LABEL, LAYERS, MIB, planned

from lightning_memo.artifacts.costs import Budget
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import PlanMemory
from lightning_memo.planner import HostMemoryError, Restrictions, make_plan
from lightning_memo.planner.make_plan import choose_plan, plain_plan

AMPLE = Budget(device_bytes=1000 * MIB, host_bytes=1000 * MIB)
KINDS = planned(Budget(device_bytes=300 * MIB, host_bytes=1000 * MIB))
ALPHA = make_plan(LAYERS, AMPLE, LABEL, Restrictions(alpha=0.0), memory_by(lambda alpha: MIB, 4))


def chosen(seconds_of_kinds: float, of_alpha: Plan, device_measured: bool = False) -> Plan:
    return choose_plan(replace(KINDS, step_seconds=seconds_of_kinds), lambda: of_alpha, device_measured=device_measured)


def test_the_faster_one() -> None:
    assert chosen(ALPHA.step_seconds / 2, ALPHA).swap == KINDS.swap
    assert chosen(2 * ALPHA.step_seconds, ALPHA) == ALPHA
    assert chosen(ALPHA.step_seconds, ALPHA).swap == KINDS.swap
    assert chosen(ALPHA.step_seconds * (1 + 1e-15), ALPHA).swap == KINDS.swap


def test_the_slowest_process_decides() -> None:
    found = choose_plan(
        replace(KINDS, step_seconds=ALPHA.step_seconds / 2),
        lambda: ALPHA,
        device_measured=False,
        slowest=lambda seconds: (3 * seconds[0], seconds[1]),
    )
    assert found == ALPHA


def test_one_that_does_not_fit_is_not_chosen_unless_it_has_run() -> None:
    large = replace(ALPHA, budget=replace(AMPLE, device_bytes=1))
    assert chosen(1e9, large).swap == KINDS.swap
    assert chosen(1e9, large, device_measured=True) == large
    other = replace(large, swap=alpha_swap(0.5, ALPHA.swap.calls, MIB))
    assert chosen(1e9, other, device_measured=True).swap == KINDS.swap


def test_without_one_of_them() -> None:
    def refuse() -> Plan:
        raise HostMemoryError(0.0, PlanMemory(host=10), Budget(device_bytes=1, host_bytes=1))

    assert choose_plan(KINDS, refuse, device_measured=True) == KINDS
    assert choose_plan(None, lambda: ALPHA, device_measured=True) == ALPHA
    with pytest.raises(HostMemoryError):
        choose_plan(None, refuse, device_measured=True)
    plain = plain_plan(LAYERS, AMPLE, LABEL)
    assert plain is not None
    assert choose_plan(plain, refuse, device_measured=True) == plain
