"""Messages about missing device memory."""

from __future__ import annotations

from lightning_memo.artifacts.plan import Plan
from lightning_memo.utils.units import format_bytes


def plan_shortage(plan: Plan, can_have_more: bool) -> str:
    """Describe the device memory that a plan lacks, and how to reduce it.

    Args:
        plan: Any plan.
        can_have_more: Whether a larger `device_memory` may help.

    Returns:
        One line; empty if the plan fits.
    """
    if not plan.device_excess_bytes:
        return ""
    ways = ["shorten the sequence"]
    if plan.swap.alpha > 0:
        ways.append('set a smaller alpha or "auto"')
    transients = plan.working_set_bytes - plan.swap.buffer_bytes - plan.swap.memory.kept
    if transients == plan.costs.transient_device_bytes:  # the peak is outside the layers
        ways.append("lower loss_chunk_tokens")
    elif plan.swap.storage.slice_tokens is None:
        ways.append("set slice_tokens")
    if can_have_more:
        ways.append("raise device_memory")
    return (
        f"this plan needs {format_bytes(plan.device_bytes)} of device memory, {format_bytes(plan.device_excess_bytes)} "
        f"more than the budget of {format_bytes(plan.budget.device_bytes)}: {', '.join(ways[:-1])} or {ways[-1]}"
    )


def step_shortage(plan: Plan, taken_bytes: int) -> str:
    """Describe the device memory by which a step exceeded the budget, and how to reduce it.

    Args:
        plan: Plan of the step.
        taken_bytes: Peak of the step, model state included.

    Returns:
        One line; empty if the step stayed within the budget.
    """
    excess = taken_bytes - plan.budget.device_bytes
    if excess <= 0:
        return ""
    return (
        f"a step takes {format_bytes(taken_bytes)} of device memory, {format_bytes(excess)} more than the budget of "
        f"{format_bytes(plan.budget.device_bytes)}, although its plan expects {format_bytes(plan.device_bytes)}: lower "
        "device_memory by the excess, so that plans leave room for it, or shorten the sequence"
    )
