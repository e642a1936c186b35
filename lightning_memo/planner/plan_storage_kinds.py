"""The plan of `storage="kinds"`, whose memory is exact to the byte."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_memo.artifacts.costs import OTHER, CallCosts, LayerCosts, StorageCosts
from lightning_memo.artifacts.plan import (
    DiskTier,
    Fingerprint,
    Plan,
    PlanMemory,
    Resource,
    StorageBudget,
    StoragePlan,
    SwapPlan,
)
from lightning_memo.planner.storage_planner import StorageError, plan_storage
from lightning_memo.planner.token_slices import SavedBytes, with_common_bounds
from lightning_memo.utils.units import format_bytes, format_seconds

# Alignment adds less than 1 %, for which the second attempt leaves room. The share of the bounce buffers depends on the
# spilled bytes; a few more attempts find both.
_ATTEMPTS: Final = 10
# Bounce buffers are never smaller than the bytes that a layer call spills.
_LEAST_BOUNCE_SHARE: Final = 1.0

Unit = Literal["GiB", "MiB", "GB/s", "MB/s"]
_UNITS: Final[dict[Unit, float]] = {"GiB": 2.0**30, "MiB": 2.0**20, "GB/s": 1e9, "MB/s": 1e6}
# A resource is binding if increasing it by a small fraction shortens the step by more than this part of the fraction.
_LEAST_ELASTICITY: Final = 1e-6


def plan_kinds(
    costs: LayerCosts,
    storage_costs: StorageCosts,
    budget: StorageBudget,
    fingerprint: Fingerprint,
    *,
    tile_tokens: int,
    memory_of: Callable[[StoragePlan], PlanMemory],
    common_bounds: Collection[int] | None = None,
    nested: bool = False,
) -> Plan:
    """Decide where each kind of tensor is stored so that the step time is minimal and all budgets hold to the byte.

    Args:
        costs: Measured costs of all layer calls that are alive at once.
        storage_costs: The same costs for each kind of tensor.
        budget: Device, host and disk bytes of this process, and the bandwidths of the disk.
        fingerprint: Run on which the costs were measured.
        tile_tokens: Slices begin at multiples of this many tokens where possible.
        memory_of: Returns the exact memory of a plan, alignment included.
        common_bounds: Where slices of other processes end, if all layer calls run in the same slices as these; `None`
            if each may be cut by itself.
        nested: Whether attention runs over all slices of a layer at once, so that its outputs cannot be recomputed.

    Raises:
        StorageError: The budget cannot hold the tensors that have to be stored.
    """
    swap = _Problem(storage_costs, tile_tokens, memory_of, common_bounds, nested).best(budget)
    storage = swap.storage
    return Plan(
        fingerprint=fingerprint,
        costs=costs,
        budget=budget.capacities,
        swap=swap,
        step_seconds=storage.needs.step_seconds,
        reason=_reason(storage, "a step" if swap.in_flight is None else "the time of this stage"),
        storage_costs=storage_costs,
    )


def plan_of_one_micro_batch(plan: Plan) -> Plan:
    """Return a plan for several micro-batches in flight as one of a single micro-batch.

    Its seconds and host bytes are those of one, and what stays on the device is that of all of them.

    Args:
        plan: Plan whose costs are those of one micro-batch.
    """
    swap, storage = plan.swap, plan.swap.storage
    assert swap.in_flight is not None
    count, calls = swap.in_flight, plan.costs.calls
    storage = replace(
        storage,
        call_classes=storage.call_classes[:calls],
        needs=replace(storage.needs, step_seconds=storage.needs.step_seconds / count),
        prices=tuple(replace(price, seconds=price.seconds / count) for price in storage.prices),
    )
    swap = replace(
        swap,
        storage=storage,
        memory=replace(swap.memory, host=swap.memory.host // count, disk=swap.memory.disk[:calls]),
        in_flight=None,
    )
    return replace(plan, swap=swap, step_seconds=plan.step_seconds / count, reason=_reason(storage, "a step"))


def common_problem(
    problems: Sequence[tuple[StorageCosts, StorageBudget]], common_bounds: bool = False
) -> tuple[StorageCosts, StorageBudget] | None:
    """Combine the processes' problems: the costs of the slowest process and the smallest budget.

    Args:
        problems: Costs and budget of each process.
        common_bounds: Whether the layers of all processes run in the same slices.

    Returns:
        The common costs and budget; None if the layers of the processes save different sizes.

    Raises:
        StorageError: Layers that have to run in the same slices save different sizes.
    """
    sizes = [
        (costs.call_classes, [(call.kinds, call.sizes, call.swapped_other_bytes) for call in costs.classes])
        for costs, _ in problems
    ]
    if any(size != sizes[0] for size in sizes):
        if common_bounds:
            raise StorageError(
                "layers save tensors of different sizes on processes that share the tokens of a sequence or experts, "
                'and have to run in the same slices: use storage="alpha"'
            )
        return None
    slowest = max((costs for costs, _ in problems), key=_compute_seconds)
    budgets = [budget for _, budget in problems]
    least = min(
        limits.device_bytes - costs.fixed_device_bytes - costs.transient_device_bytes for costs, limits in problems
    )
    # What is not recomputed lowers the peak of each process, at least by this.
    recomputed = min(costs.recomputed_device_bytes for costs, _ in problems)
    return replace(slowest, recomputed_device_bytes=recomputed), StorageBudget(
        device_bytes=max(slowest.fixed_device_bytes + slowest.transient_device_bytes + least, 0),
        host_bytes=min(budget.host_bytes for budget in budgets),
        disk_bytes=min(budget.disk_bytes for budget in budgets),
        disk=_common_disk([budget.disk for budget in budgets]),
    )


def _compute_seconds(costs: StorageCosts) -> float:
    return sum(costs.classes[n].forward_seconds + costs.classes[n].backward_seconds for n in costs.call_classes)


def _common_disk(tiers: Sequence[DiskTier | None]) -> DiskTier | None:
    """The smallest capacity and bandwidths; None if a process has no disk."""
    known = [tier for tier in tiers if tier is not None]
    if len(known) < len(tiers):
        return None
    return DiskTier(
        capacity_bytes=min(tier.capacity_bytes for tier in known),
        write_bytes_per_second=min(tier.write_bytes_per_second for tier in known),
        read_bytes_per_second=min(tier.read_bytes_per_second for tier in known),
    )


@dataclass(frozen=True, slots=True)
class _Problem:
    """Costs of the tensors to store, and a function that counts a plan's bytes."""

    costs: StorageCosts
    tile_tokens: int
    memory_of: Callable[[StoragePlan], PlanMemory]
    common_bounds: Collection[int] | None
    nested: bool

    def best(self, budget: StorageBudget) -> SwapPlan:
        """The fastest plan that fits. It may be one without the disk, which needs no bounce buffers."""
        found: list[SwapPlan] = []
        refused: StorageError | None = None
        ways = [budget] if budget.disk is None else [budget, replace(budget, disk_bytes=0, disk=None)]
        for limits in ways:
            try:
                found.append(self._fitting(limits))
            except StorageError as error:
                refused = refused or error
            if found and not found[0].disk_bytes:
                break
        if not found:
            raise refused or AssertionError
        return min(reversed(found), key=_step_seconds)  # of two equally fast ones the one without the disk

    def _fitting(self, budget: StorageBudget) -> SwapPlan:
        """The best plan whose exact bytes fit: the last attempt's excess lowers the limits of the next attempt."""
        disk = budget.disk and replace(budget.disk, bounce_share=_LEAST_BOUNCE_SHARE)
        limits = replace(budget, disk=disk)
        for _ in range(_ATTEMPTS):
            swap = self._exact(
                plan_storage(self.costs, limits, tile_tokens=self.tile_tokens, may_drop_attention=not self.nested)
            )
            less = self._next_limits(limits, swap, budget)
            if less is None:
                return self._explained(swap, budget)
            if less == limits:
                break
            limits = less
        on_disk = f", {format_bytes(budget.disk_bytes)} of disk" if budget.disk_bytes else ""
        raise StorageError(
            f"the tensors that have to be stored do not fit {format_bytes(budget.host_bytes)} of host memory{on_disk} "
            f"and {format_bytes(budget.device_bytes)} of device memory: raise host_memory or device_memory"
        )

    def _exact(self, storage: StoragePlan) -> SwapPlan:
        if self.common_bounds is not None:
            storage = with_common_bounds(storage, self.common_bounds)
        return SwapPlan(
            storage=storage,
            memory=self.memory_of(storage),
            schedule="nest" if self.nested else "layer",
            in_flight=self.costs.in_flight,
        )

    def _next_limits(self, limits: StorageBudget, swap: SwapPlan, budget: StorageBudget) -> StorageBudget | None:
        """Budget of the next attempt if a plan made for `limits` exceeds the budget; None if the plan fits."""
        device = max(self._device_bytes(swap) - budget.device_bytes, 0)
        host = max(swap.host_bytes - budget.host_bytes, 0)
        excess = max(swap.disk_bytes - budget.disk_bytes, 0)
        if not (device or host or excess):
            return None
        needs = swap.storage.needs
        disk = limits.disk
        if disk and swap.disk_bytes:
            sizes = swap.disk_layout
            share = max(sizes.bounce_bytes / sizes.slot_bytes, disk.bounce_share)
            if share > disk.bounce_share:  # with larger bounce buffers it may fit
                host = 0
            capacity = _reduced(disk.capacity_bytes, needs.disk_bytes, excess)
            disk = replace(disk, bounce_share=share, capacity_bytes=capacity)
        return replace(
            limits,
            device_bytes=_reduced(limits.device_bytes, needs.device_bytes, device),
            host_bytes=_reduced(limits.host_bytes, needs.host_bytes, host),
            disk=disk,
        )

    def _device_bytes(self, swap: SwapPlan) -> int:
        always = self.costs.fixed_device_bytes + self.costs.working_bytes(
            [call.tokens(OTHER) for call in swap.storage.calls]
        )
        return always + swap.buffer_bytes + swap.memory.kept

    def _explained(self, swap: SwapPlan, budget: StorageBudget) -> SwapPlan:
        """The plan with the whole budget as limits and with its exact bytes as needs."""
        limits: dict[Resource, int] = {
            "device memory": budget.device_bytes,
            "host memory": budget.host_bytes,
            "disk space": budget.disk_bytes,
        }
        prices = tuple(replace(price, limit=limits.get(price.resource, price.limit)) for price in swap.storage.prices)
        needs = replace(
            swap.storage.needs,
            device_bytes=self._device_bytes(swap),
            rounding_bytes=swap.buffer_bytes,
            host_bytes=swap.host_bytes,
            disk_bytes=swap.disk_bytes,
        )
        return replace(swap, storage=replace(swap.storage, prices=prices, needs=needs))


def _reduced(limit: int, needed: int, excess: int) -> int:
    """The limit of the next attempt, below the bytes that the last attempt needed without alignment."""
    return max(min(limit - excess, needed - 1), 0) if excess else limit


def _step_seconds(swap: SwapPlan) -> float:
    return swap.storage.needs.step_seconds


def _reason(plan: StoragePlan, time: str) -> str:
    """One sentence for each binding resource, about `time`."""
    binding = [row for row in resource_sensitivities(plan) if row.binds]
    if not binding:
        return f"Nothing limits {time}: more memory or bandwidth would not make it shorter."
    return " ".join(_sentence(row, time) for row in binding)


def _sentence(row: ResourceSensitivity, time: str) -> str:
    more = f"with 1 {row.unit} more, {time} would be up to {format_seconds(row.seconds)} ({row.percent:.1f} %) shorter"
    return f"{row.resource[0].upper()}{row.resource[1:]} is a limit: {more}."


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceSensitivity:
    """How the step time depends on one resource."""

    resource: Resource
    unit: Unit
    """Unit of the numbers; the smaller unit if there is less than one of the larger."""

    limit: float
    """Available amount."""

    used: float | None
    """Amount that the plan needs; None for bandwidths."""

    binds: bool
    """Whether more of the resource would shorten the step."""

    seconds: float
    """Upper bound of the seconds that one more unit saves: its first bytes save the most."""

    percent: float
    """`seconds` in percent of the step."""


def resource_sensitivities(plan: StoragePlan) -> list[ResourceSensitivity]:
    """Sensitivity of the step time to each resource, from the dual variables of the linear program.

    Args:
        plan: A plan with its prices.

    Returns:
        One entry for each resource. Binding resources come first, those with the largest gain before the others.
    """
    rows = [_sensitivity(plan, price.resource, price.limit, price.seconds) for price in plan.prices]
    return sorted(rows, key=lambda row: (not row.binds, -row.seconds))


def _sensitivity(plan: StoragePlan, resource: Resource, limit: float, seconds: float) -> ResourceSensitivity:
    used = {
        "device memory": plan.needs.device_bytes,
        "host memory": plan.needs.host_bytes,
        "disk space": plan.needs.disk_bytes,
    }
    units: tuple[Unit, Unit] = ("GiB", "MiB") if resource in used else ("GB/s", "MB/s")
    unit = units[0] if limit >= _UNITS[units[0]] else units[1]
    size = _UNITS[unit]
    gain = seconds * size
    return ResourceSensitivity(
        resource=resource,
        unit=unit,
        limit=limit / size,
        used=used[resource] / size if resource in used else None,
        binds=seconds * limit > _LEAST_ELASTICITY * plan.bound_seconds,
        seconds=gain,
        percent=100 * gain / plan.bound_seconds if plan.bound_seconds else 0.0,
    )


def largest_loads(calls: Sequence[Sequence[CallCosts]]) -> list[CallCosts]:
    """Return the costs of each layer call, with the sizes of the largest load.

    Calls that differ only in what is neither input, nor attention, nor the output of a product differ in their loads.
    They get one size, and so one plan.

    Args:
        calls: The costs of each layer call on each process. The times are those of the first process.
    """

    def alike(call: CallCosts) -> object:
        return replace(call, other_bytes=0).sizes, call.kinds, call.window_tokens

    largest: dict[object, int] = {}
    for call in (call for of_process in calls for call in of_process):
        largest[alike(call)] = max(call.other_bytes, largest.get(alike(call), 0))
    return [_with_others(call, largest[alike(call)]) for call in calls[0]]


def _with_others(call: CallCosts, other_bytes: int) -> CallCosts:
    moved = call.swapped_other_bytes
    if moved is not None:  # more rows of the same widths
        moved = -(-moved * other_bytes // max(call.other_bytes, 1))
    return replace(call, other_bytes=other_bytes, swapped_other_bytes=moved)


def largest_saved(saved: Sequence[Sequence[Sequence[SavedBytes]]]) -> list[list[SavedBytes]]:
    """Return the tensors that each layer call saves; those of each kind are of the process that saves most of it.

    Args:
        saved: The tensors that each layer call saves on each process.
    """
    return [_largest_of_call(of_processes) for of_processes in zip(*saved, strict=True)]


def _largest_of_call(saved: Sequence[Sequence[SavedBytes]]) -> list[SavedBytes]:
    kinds = dict.fromkeys(item.kind for items in saved for item in items)
    most = []
    for kind in kinds:
        ways = [[item for item in items if item.kind == kind] for items in saved]
        most += max(ways, key=lambda items: sum(item.size_bytes for item in items))
    return most
