"""Lines about device memory that is not there. Formatting only."""

from __future__ import annotations

from lightning_memo.artifacts.plan import Plan
from lightning_memo.utils.units import format_bytes


def plan_shortage(plan: Plan, can_have_more: bool) -> str:
    """What a plan lacks on the device, and what to do; empty if it fits.

    Args:
        plan: any plan.
        can_have_more: whether a larger `device_memory` may help.
    """
    if not plan.device_excess_bytes:
        return ""
    ways = ["shorten the sequence"]
    if plan.swap.alpha > 0:
        ways.append('set a smaller alpha or "auto"')
    costs, swap = plan.costs, plan.swap
    if costs.working_bytes_at(swap.alpha, swap.slice_tokens) == costs.transient_device_bytes:  # outside of the layers
        ways.append("lower loss_chunk_tokens")
    elif swap.slice_tokens is None:
        ways.append("set slice_tokens")
    if can_have_more:
        ways.append("raise device_memory")
    return (
        f"this plan needs {format_bytes(plan.device_bytes)} of device memory, {format_bytes(plan.device_excess_bytes)} "
        f"more than the budget of {format_bytes(plan.budget.device_bytes)}: {', '.join(ways[:-1])} or {ways[-1]}"
    )


def step_shortage(plan: Plan, taken_bytes: int) -> str:
    """What a step took of the device beyond the budget, and what to do; empty if it did not.

    Args:
        plan: by which it ran.
        taken_bytes: by the step at its peak, model state included.
    """
    excess = taken_bytes - plan.budget.device_bytes
    if excess <= 0:
        return ""
    return (
        f"a step takes {format_bytes(taken_bytes)} of device memory, {format_bytes(excess)} more than the budget of "
        f"{format_bytes(plan.budget.device_bytes)}, though its plan expects {format_bytes(plan.device_bytes)}: lower "
        "device_memory by as much, so that less is planned, or shorten the sequence"
    )
