"""The plan that says kind by kind what layer calls store, in bytes that are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from lightning_memo.config import format_bytes, format_seconds
from lightning_memo.costs import Budget, LayerCosts
from lightning_memo.plan import Fingerprint, Plan, StoredBytes, SwapPlan
from lightning_memo.planner.sensitivity import Explanation, explain
from lightning_memo.planner.storage_search import StorageError, plan_storage
from lightning_memo.storage_costs import ALL, StorageBudget, StorageCosts
from lightning_memo.storage_plan import StoragePlan

# Alignment adds less than a byte in a hundred; the second attempt leaves room for what it added in the first.
_ATTEMPTS: Final = 10
# Of the device memory that was measured to be free: allocators fragment, and libraries take workspaces.
_USABLE_DEVICE_SHARE: Final = 0.9


def plan_kinds(
    costs: LayerCosts,
    storage_costs: StorageCosts,
    budget: Budget,
    fingerprint: Fingerprint,
    *,
    tile_tokens: int,
    stored_bytes: Callable[[StoragePlan], StoredBytes],
) -> Plan:
    """Decide what is stored and where, so that a step takes the least time and both budgets are kept to the byte.

    Args:
        costs: as measured; all its layer calls are alive at once.
        storage_costs: the same kind by kind.
        budget: device and host bytes of this process.
        fingerprint: what the costs were measured on.
        tile_tokens: slices begin at multiples of it where possible.
        stored_bytes: exact bytes of a plan, alignment included.

    Raises:
        StorageError: The budget cannot hold the least that has to be stored.
    """
    storage, sizes = _fitting(storage_costs, budget, tile_tokens, stored_bytes)
    swap = SwapPlan(
        mode="memo",
        alpha=storage.share(ALL, "swap"),
        schedule="layer",
        slice_tokens=None,
        calls=costs.calls,
        slot_bytes=sizes.slot,
        storage=storage,
        stored_host_bytes=sizes.host,
        kept_bytes=sizes.kept,
    )
    return Plan(
        fingerprint=fingerprint,
        costs=costs,
        budget=budget,
        swap=swap,
        step_seconds=storage.needs.step_seconds,
        reason=_reason(storage),
        storage_costs=storage_costs,
    )


def with_spare_device(budget: Budget, costs: LayerCosts) -> Budget:
    """Leave some of the device memory that was measured to be free.

    Args:
        budget: all that is free.
        costs: what is needed whatever the plan.
    """
    always = costs.fixed_device_bytes + costs.working_bytes(1.0)
    room = max(budget.device_bytes - always, 0)
    return replace(budget, device_bytes=budget.device_bytes - room + int(_USABLE_DEVICE_SHARE * room))


def common_problem(problems: Sequence[tuple[StorageCosts, Budget]]) -> tuple[StorageCosts, Budget] | None:
    """The costs of the slowest process and what every process has room for; None if their layers save other bytes.

    Args:
        problems: costs and budget of each process.
    """
    sizes = [(costs.call_classes, [(call.kinds, call.sizes) for call in costs.classes]) for costs, _ in problems]
    if any(size != sizes[0] for size in sizes):
        return None
    slowest = max((costs for costs, _ in problems), key=_compute_seconds)
    least = min(
        limits.device_bytes - costs.fixed_device_bytes - costs.transient_device_bytes for costs, limits in problems
    )
    device_bytes = slowest.fixed_device_bytes + slowest.transient_device_bytes + least
    host_bytes = min(limits.host_bytes for _, limits in problems)
    return slowest, Budget(device_bytes=max(device_bytes, 0), host_bytes=host_bytes)


def _compute_seconds(costs: StorageCosts) -> float:
    return sum(costs.classes[n].forward_seconds + costs.classes[n].backward_seconds for n in costs.call_classes)


def _fitting(
    costs: StorageCosts, budget: Budget, tile_tokens: int, stored_bytes: Callable[[StoragePlan], StoredBytes]
) -> tuple[StoragePlan, StoredBytes]:
    """The best plan whose exact bytes fit: what alignment adds too much, the next attempt has less to spend."""
    limits = StorageBudget(device_bytes=budget.device_bytes, host_bytes=budget.host_bytes)
    always = costs.fixed_device_bytes + costs.transient_device_bytes
    for _ in range(_ATTEMPTS):
        plan = plan_storage(costs, limits, tile_tokens=tile_tokens)
        sizes = stored_bytes(plan)
        host = max(sizes.host - budget.host_bytes, 0)
        device = max(always + 2 * sizes.slot + sizes.kept - budget.device_bytes, 0)
        if not host and not device:
            return plan, sizes
        limits = replace(
            limits,
            device_bytes=max(limits.device_bytes - device, 0),
            host_bytes=max(limits.host_bytes - host, 0),
        )
    raise StorageError(
        f"what has to be stored does not fit {format_bytes(budget.host_bytes)} of host memory and "
        f"{format_bytes(budget.device_bytes)} of device memory: raise host_memory or device_memory"
    )


def _reason(plan: StoragePlan) -> str:
    """What binds, in a sentence for each resource."""
    binding = [row for row in explain(plan) if row.binds]
    if not binding:
        return "Nothing binds: more memory or bandwidth would not make the step shorter."
    return " ".join(_sentence(row) for row in binding)


def _sentence(row: Explanation) -> str:
    more = f"1 {row.unit} more would save at most {format_seconds(row.seconds)} of a step ({row.percent:.1f} %)"
    return f"{row.resource[0].upper()}{row.resource[1:]} binds: {more}."
