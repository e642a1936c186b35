"""Makes a storage plan in whole tokens: solves the linear program, rounds its shares and checks the result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_memo.artifacts.storage_budget import StorageBudget
from lightning_memo.artifacts.storage_plan import CallPlan, StorageNeeds, StoragePlan, StoredRange
from lightning_memo.artifacts.tensor_kind_costs import PLACES, Place, StorageCosts
from lightning_memo.planner.storage.simulate_step import simulate
from lightning_memo.planner.storage.storage_needs import needs_of, total
from lightning_memo.planner.storage.storage_program import SINGLE_ALPHA, StorageSolution, required_kinds, solve_storage
from lightning_memo.planner.storage.storage_rounding import roundings
from lightning_memo.utils.units import format_bytes

_FEWEST_TILES: Final = 16
_SAME: Final = 1e-9
_Found = tuple[tuple[CallPlan, ...], StorageNeeds]


class StorageError(ValueError):
    """The budget cannot hold the tensors that have to be stored."""


def plan_storage(
    costs: StorageCosts,
    budget: StorageBudget,
    *,
    tile_tokens: int = 128,
    may_drop_attention: bool = True,
    tolerance: float = 1e-3,
) -> StoragePlan:
    """Decide where the tensors of every layer call are stored so that the step time is minimal.

    Args:
        costs: Bytes and seconds of each class of layer calls.
        budget: Capacities, which the plan respects to the byte.
        tile_tokens: Ranges begin at multiples of this many tokens if such a plan fits.
        may_drop_attention: Whether attention outputs may be recomputed.
        tolerance: Share of the step time by which a simpler plan may be slower, that is, one that recomputes no
            attention output or that cuts layers into fewer and longer slices. The plan is never slower than the best
            single alpha.

    Raises:
        StorageError: The budget cannot hold the layer inputs, and the attention outputs if they may not be recomputed.
        RuntimeError: HiGHS failed.
    """
    ideal = solve_storage(costs, budget, may_drop_attention=may_drop_attention)
    if ideal is None:
        raise StorageError(_shortage(costs, budget, may_drop_attention))
    single = solve_storage(costs, budget, may_drop_attention=False, allowed=SINGLE_ALPHA)
    alpha_seconds = single.seconds if single else None
    longest = min((1 + tolerance) * ideal.seconds, (1 + _SAME) * (alpha_seconds or math.inf))
    simple = solve_storage(costs, budget, may_drop_attention=False) if may_drop_attention else ideal
    if simple is None or simple.seconds > longest:
        simple = ideal
    found = _in_long_slices(costs, budget, simple, tile_tokens, longest)
    if found is None:
        found = _in_little_room(costs, budget, ideal, tile_tokens, may_drop_attention)
    calls, needs = found
    plan = StoragePlan(
        tokens=costs.tokens,
        call_classes=costs.call_classes,
        calls=calls,
        needs=needs,
        bound_seconds=ideal.seconds,
        alpha_seconds=alpha_seconds,
        prices=simple.prices,
    )
    simulate(costs, plan, budget)
    return plan


def _in_long_slices(
    costs: StorageCosts, budget: StorageBudget, solution: StorageSolution, tile_tokens: int, longest: float
) -> _Found | None:
    """Round to the largest tiles with which the step is fast enough, else to the given tiles, if that fits.

    Where layer inputs and attention outputs need small tiles to fit, the other kinds may do with large ones.
    """
    found = None
    for tile in _tiles(costs.tokens, tile_tokens):
        for required_tile in dict.fromkeys((tile, tile_tokens)):
            found = _round(costs, budget, solution, required_tile, tile)
            if found is not None and found[1].step_seconds <= longest:
                return found
    return found


def _tiles(tokens: int, tile_tokens: int) -> Iterator[int]:
    doublings = max((tokens // (_FEWEST_TILES * tile_tokens)).bit_length() - 1, 0)
    return (tile_tokens << power for power in range(doublings, -1, -1))


def _in_little_room(
    costs: StorageCosts, budget: StorageBudget, ideal: StorageSolution, tile_tokens: int, may_drop_attention: bool
) -> _Found:
    """If no rounding of the optimum fits, solve again with a budget that leaves room for rounding up."""
    for tile in (tile_tokens, 1):
        roomy = solve_storage(costs, _less(budget, costs, ideal, tile), may_drop_attention=may_drop_attention)
        for solution in (ideal, roomy):
            found = _round(costs, budget, solution, tile, tile) if solution else None
            if found is not None:
                return found
    for place in PLACES:
        # The solver violates capacities by up to 1e-9 of their largest coefficient; these plans are exact.
        least = (_all_in(place, ideal.required, costs.tokens),) * len(costs.classes)
        if (needs := needs_of(costs, budget, least)).fits(budget):
            return least, needs
    raise StorageError(_shortage(costs, budget, may_drop_attention))


def _all_in(place: Place, kinds: Sequence[str], tokens: int) -> CallPlan:
    """Store all tokens of some kinds in one place, and nothing else."""
    return CallPlan(ranges=tuple(StoredRange(kind=kind, place=place, start=0, stop=tokens) for kind in kinds))


def _round(
    costs: StorageCosts, budget: StorageBudget, solution: StorageSolution, tile: int, product_tile: int
) -> _Found | None:
    """The fastest rounded plan that fits."""
    ways = roundings(costs.classes, solution, costs.tokens, tile, product_tile)
    fitting = [(calls, needs) for calls in ways if (needs := needs_of(costs, budget, calls)).fits(budget)]
    return min(fitting, key=lambda way: way[1].step_seconds, default=None)


def _less(budget: StorageBudget, costs: StorageCosts, solution: StorageSolution, tile: int) -> StorageBudget:
    """The budget without the bytes that rounding can add: a tile for each place of a required kind, and a byte each."""
    added = [
        sum(-(-size * tile * len(PLACES) // costs.tokens) for size in call.sizes[: len(solution.required)])
        + len(PLACES) * len(call.kinds)
        for call in costs.classes
    ]
    on_device = total(costs.class_calls, added) + 2 * max(added)
    copied = total(costs.class_copies, added)
    nvme = budget.nvme and replace(budget.nvme, capacity_bytes=max(budget.nvme.capacity_bytes - copied, 0))
    return replace(
        budget,
        device_bytes=max(budget.device_bytes - on_device, 0),
        host_bytes=max(budget.host_bytes - copied, 0),
        nvme=nvme,
    )


def _shortage(costs: StorageCosts, budget: StorageBudget, may_drop_attention: bool) -> str:
    """Describe in one line what has to be stored, and the memory available for it."""
    kinds = required_kinds(may_drop_attention)
    sizes = [sum(call.sizes[: len(kinds)]) for call in costs.classes]
    least, buffers = total(costs.class_calls, sizes), 2 * max(sizes)
    room = budget.device_bytes - costs.fixed_device_bytes - costs.transient_device_bytes
    what = "layer inputs" if may_drop_attention else "layer inputs and attention outputs"
    device = f"has {format_bytes(room)} left" if room >= 0 else f"lacks {format_bytes(-room)} even without them"
    nvme = f", NVMe {format_bytes(budget.nvme.capacity_bytes)}" if budget.nvme else ""
    way_out = "raise device_memory or host_memory" if room >= 0 else "raise device_memory"
    return (
        f"the {what} of {costs.calls} layer calls need {format_bytes(least)}, and if they are offloaded, another "
        f"{format_bytes(buffers)} of device buffers, but the device {device} and the host has "
        f"{format_bytes(budget.host_bytes)}{nvme}: {way_out}, or shorten the sequence"
    )
