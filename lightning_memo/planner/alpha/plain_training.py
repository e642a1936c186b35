"""The plan of plain training, chosen where the device can hold all activations."""

from __future__ import annotations

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import Schedule, SwapPlan
from lightning_memo.planner.alpha.step_time import steady, step_seconds
from lightning_memo.utils.units import format_bytes


def plain_plan(
    costs: LayerCosts, budget: Budget, fingerprint: Fingerprint, schedule: Schedule, slice_tokens: int | None = None
) -> Plan | None:
    """A plan that swaps and recomputes nothing.

    Args:
        costs: Measured costs of all layer calls that are alive at once.
        budget: Only the device bytes count.
        fingerprint: Run on which the costs were measured.
        schedule: Order in which the slices of other plans would run.
        slice_tokens: Maximum number of tokens of these slices; None for no limit.

    Returns:
        The plan; None if it does not fit the device.
    """
    needed_bytes = costs.fixed_device_bytes + costs.working_bytes(0.0) + costs.skeletal_bytes
    if needed_bytes > budget.device_bytes:
        return None
    swap = SwapPlan(
        mode="plain",
        alpha=0.0,
        schedule=schedule,
        slice_tokens=slice_tokens,
        calls=costs.calls,
        slot_bytes=0,
        in_flight=costs.in_flight,
    )
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
