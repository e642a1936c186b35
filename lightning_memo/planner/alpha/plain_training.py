"""Plain training, where the device has room for all that layers save."""

from __future__ import annotations

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan, Schedule, SwapPlan
from lightning_memo.planner.alpha.step_time import steady, step_seconds
from lightning_memo.utils.units import format_bytes


def plain_plan(
    costs: LayerCosts, budget: Budget, fingerprint: Fingerprint, schedule: Schedule, slice_tokens: int | None = None
) -> Plan | None:
    """A plan by which nothing is swapped or recomputed; None if it does not fit the device.

    Args:
        costs: as measured; all its layer calls are alive at once.
        budget: only its device bytes count.
        fingerprint: what the costs were measured on.
        schedule: order in which the slices of other plans run.
        slice_tokens: most tokens of these.
    """
    needed_bytes = costs.fixed_device_bytes + costs.working_bytes(0.0) + costs.skeletal_bytes
    if needed_bytes > budget.device_bytes:
        return None
    swap = SwapPlan(
        mode="plain", alpha=0.0, schedule=schedule, slice_tokens=slice_tokens, calls=costs.calls, slot_bytes=0
    )
    return Plan(
        fingerprint=fingerprint,
        costs=costs,
        budget=budget,
        swap=swap,
        step_seconds=step_seconds(steady(costs), swap),
        reason=(
            f"Device memory is ample: plain training needs {format_bytes(needed_bytes)} of "
            f"{format_bytes(budget.device_bytes)}, so nothing is swapped or recomputed."
        ),
    )
