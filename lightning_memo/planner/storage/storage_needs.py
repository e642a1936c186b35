"""Time and memory that a storage plan needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_memo.artifacts.storage_budget import StorageBudget
from lightning_memo.artifacts.storage_plan import CallPlan, StorageNeeds
from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, PLACES, CallCosts, Place, StorageCosts


def needs_of(costs: StorageCosts, budget: StorageBudget, calls: Sequence[CallPlan]) -> StorageNeeds:
    """Time and memory of a step.

    Args:
        costs: Bytes and seconds of each class of layer calls.
        budget: Only its NVMe bandwidths and bounce buffers are used, not the capacities.
        calls: Plan of each class.
    """
    kept, swapped, spilled = (
        [_bytes(call, plan, costs.tokens, place) for call, plan in zip(costs.classes, calls, strict=True)]
        for place in PLACES
    )
    rounding = 2 * max(a + b for a, b in zip(swapped, spilled, strict=True))
    always = costs.fixed_device_bytes + costs.working_bytes([plan.tokens(ALL) for plan in calls])
    return StorageNeeds(
        step_seconds=_step_seconds(costs, budget, calls),
        device_bytes=always + rounding + total(costs.class_calls, kept),
        rounding_bytes=rounding,
        host_bytes=total(costs.class_copies, swapped) + _bounce_bytes(costs, budget, spilled),
        nvme_bytes=total(costs.class_copies, spilled),
    )


def _bounce_bytes(costs: StorageCosts, budget: StorageBudget, spilled: Sequence[int]) -> int:
    """Host bytes of the bounce buffers."""
    if budget.nvme is None:
        return 0
    leaving = (size for copies, size in zip(costs.class_copies, spilled, strict=True) if copies)
    return math.ceil(budget.nvme.bounce_share * max(leaving, default=0))


def total(counts: Sequence[int], sizes: Sequence[int]) -> int:
    """Sum of the sizes, each times its count."""
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _step_seconds(costs: StorageCosts, budget: StorageBudget, calls: Sequence[CallPlan]) -> float:
    """Expected seconds of a step: for each call the longer of its copies and the next call's computation.

    If all layer calls are equal, this is MEMO's time of a step (section 4.2).
    """
    parts = list(zip(costs.classes, calls, strict=True))

    def moved(plan: CallPlan) -> float:
        return plan.tokens(ALL, "swap", "spill") / costs.tokens

    compute = [
        (
            call.forward_seconds + moved(plan) * call.compress_seconds,
            call.backward_seconds + recompute_seconds(call, plan, costs.tokens) + moved(plan) * call.restore_seconds,
        )
        for call, plan in parts
    ]
    copies = [_copy_seconds(costs, budget, call, plan) for call, plan in parts]
    seconds = costs.outside_seconds
    for number in costs.unpaired:
        seconds += sum(compute[number])
    for (copied, computed), count in costs.pairs.items():
        seconds += count * sum(max(pair) for pair in zip(copies[copied], compute[computed], strict=True))
    return seconds


def recompute_seconds(call: CallCosts, plan: CallPlan, tokens: int) -> float:
    """Seconds that a layer call recomputes.

    Args:
        call: Costs of the call.
        plan: What the call stores.
        tokens: Tokens of the call.
    """
    whole = plan.tokens(ALL)
    again = sum(product.seconds * (tokens - whole - plan.tokens(product.name)) for product in call.products)
    dropped = call.attention_share(tokens - plan.tokens(ATTENTION), tokens) * call.attention_seconds
    return (again + call.elementwise_seconds * (tokens - whole)) / tokens + dropped


def _copy_seconds(costs: StorageCosts, budget: StorageBudget, call: CallCosts, plan: CallPlan) -> tuple[float, float]:
    moved, spilled = (_bytes(call, plan, costs.tokens, *places) for places in (("swap", "spill"), ("spill",)))
    out, back = moved / costs.offload_bytes_per_second, moved / costs.prefetch_bytes_per_second
    if budget.nvme is None:
        return out, back
    return (
        max(out, spilled / budget.nvme.write_bytes_per_second),
        max(back, spilled / budget.nvme.read_bytes_per_second),
    )


def _bytes(call: CallCosts, plan: CallPlan, tokens: int, *places: Place) -> int:
    """Bytes that a layer call stores in some places; each kind and place is rounded up."""
    return sum(
        -(-size * plan.tokens(kind, place) // tokens)
        for place in places
        for kind, size in zip(call.kinds, call.sizes_in(place), strict=True)
    )
