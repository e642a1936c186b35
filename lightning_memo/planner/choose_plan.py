"""The choice between plain training, a place for each kind of tensor, and a single alpha, in the device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan, PlanMemory, Schedule, SwapPlan, step_device_bytes
from lightning_memo.planner.step_time import steady, step_seconds
from lightning_memo.planner.token_slices import plan_of_plain_training
from lightning_memo.utils.units import format_bytes

Seconds = tuple[float, float]
"""Expected seconds of a step by kinds of tensors, and by a single alpha."""

# The rest of the free device memory is left to workspaces of kernels and to what the allocator rounds up and fragments.
_USABLE_SHARE: Final = 0.96
# Kept tensors fill the memory that is left then, while allocators fragment.
_USABLE_SHARE_FOR_KEPT: Final = 0.9


def choose_plan(
    by_kind: Plan | None,
    by_alpha: Callable[[], Plan],
    *,
    device_measured: bool,
    slowest: Callable[[Seconds], Seconds] = lambda seconds: seconds,
) -> Plan:
    """Return the plan of `storage="auto"`: plain training if that fits, otherwise the faster of two plans.

    Plans by kind leave more of the device free, for which they may recompute attention. Where no limit was given, alpha
    0 fits, whatever is expected of it: the profiled step has just run by it.

    Args:
        by_kind: Plan that names a place for each kind of tensor, or a plan of plain training; None if there is none.
        by_alpha: Returns the plan with a single alpha.
        device_measured: Whether the device budget is the memory that was free, rather than a limit of the user.
        slowest: Returns the times of the slowest process, given those of this one.

    Raises:
        ValueError: There is no plan by kind, and the host is too small for a single alpha.
    """
    if by_kind is not None and by_kind.swap.plain:
        return by_kind
    try:
        of_alpha = by_alpha()
    except ValueError:
        if by_kind is None:
            raise
        return by_kind
    if by_kind is None:
        return of_alpha
    fits = not of_alpha.device_excess_bytes or (device_measured and of_alpha.swap.alpha == 0.0)
    kind_seconds, alpha_seconds = slowest((by_kind.step_seconds, of_alpha.step_seconds if fits else math.inf))
    return of_alpha if alpha_seconds < kind_seconds else by_kind


def usable_device_bytes(fixed_bytes: int, free_bytes: int) -> int:
    """Return the device bytes that a plan may use.

    Args:
        fixed_bytes: Bytes that every plan needs.
        free_bytes: Free bytes in addition to these.
    """
    return fixed_bytes + int(_USABLE_SHARE * free_bytes)


def with_spare_device(budget: Budget, costs: LayerCosts) -> Budget:
    """Reserve a part of the free device memory for fragmentation and workspaces, where tensors are kept.

    Args:
        budget: All free memory.
        costs: Costs whose fixed and working bytes every plan needs.
    """
    always = costs.fixed_device_bytes + costs.working_bytes(1.0)
    room = max(budget.device_bytes - always, 0)
    return replace(budget, device_bytes=budget.device_bytes - room + int(_USABLE_SHARE_FOR_KEPT * room))


def plain_plan(costs: LayerCosts, budget: Budget, fingerprint: Fingerprint, schedule: Schedule) -> Plan | None:
    """A plan that swaps and recomputes nothing.

    Args:
        costs: Measured costs of all layer calls that are alive at once.
        budget: Only the device bytes count.
        fingerprint: Run on which the costs were measured.
        schedule: Order in which the slices of other plans would run.

    Returns:
        The plan; None if it does not fit the device.
    """
    storage, memory = plan_of_plain_training(costs.tokens, costs.calls), PlanMemory(kept=costs.skeletal_bytes)
    needed_bytes = costs.fixed_device_bytes + step_device_bytes(costs, storage, memory)
    if needed_bytes > budget.device_bytes:
        return None
    swap = SwapPlan(storage=storage, memory=memory, schedule=schedule, in_flight=costs.in_flight)
    return Plan(
        fingerprint=fingerprint,
        costs=costs,
        budget=budget,
        swap=swap,
        step_seconds=step_seconds(steady(costs), swap),
        reason=(
            f"Device memory is ample: plain training needs {format_bytes(needed_bytes)} of the "
            f"{format_bytes(budget.device_bytes)} budget, so nothing is swapped or recomputed."
        ),
    )
