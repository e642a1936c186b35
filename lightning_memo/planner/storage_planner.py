"""Makes a storage plan in whole tokens: solves the linear program, rounds its shares and checks the result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning_memo.artifacts.storage_plan import CallPlan, StorageBudget, StorageNeeds, StoragePlan, StoredRange
from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, INPUT, PLACES, CallCosts, Place, StorageCosts
from lightning_memo.planner.simulate_step import simulate
from lightning_memo.planner.storage_program import (
    SINGLE_ALPHA,
    Shares,
    StorageSolution,
    required_kinds,
    solve_storage,
)
from lightning_memo.utils.units import format_bytes

_FEWEST_TILES: Final = 16
_SAME: Final = 1e-9
_Found = tuple[tuple[CallPlan, ...], StorageNeeds]

# A tile is stored if at most this part of it is missing: rounding up, to the nearest, and down. Rounding down tolerates
# a small part because the solver reaches whole tiles only within its tolerance.
_MISSING: Final = (0.999, 0.5, 0.001)
_NOTHING: Final = 1e-7


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


def roundings(
    calls: Sequence[CallCosts], solution: StorageSolution, tokens: int, tile: int, product_tile: int
) -> Iterator[tuple[CallPlan, ...]]:
    """Round shares of the tokens to ranges that begin at multiples of a tile, in several ways.

    Args:
        calls: Classes of layer calls.
        solution: Shares of each class.
        tokens: Tokens of a layer call.
        tile: Tokens of a tile of layer inputs and attention outputs.
        product_tile: Tokens of a tile of all other kinds.

    Yields:
        Plans of all classes. The last ones store no more than the shares, except for kinds that must be stored.
    """
    for missing in _MISSING:
        for spare in (*PLACES, None):
            tilings = [
                _Tiling(shares, tokens, tile, product_tile, solution.required, missing, spare)
                for shares in solution.shares
            ]
            yield tuple(tiling.plan(call) for call, tiling in zip(calls, tilings, strict=True))


@dataclass(frozen=True, slots=True)
class _Tiling:
    """One way to round: each share is rounded, and so is their sum over the places, which can be larger."""

    shares: Shares
    tokens: int
    tile: int
    product_tile: int
    required: Sequence[str]
    missing: float
    spare: Place | None  # gets the tokens by which the rounded sum is larger

    def plan(self, call: CallCosts) -> CallPlan:
        """Ranges of all kinds. Attention is dropped for the first tokens, so kinds that need it lie at the end."""
        given = {kind: self._lay(kind, self.tokens) for kind in (INPUT, ATTENTION)}
        whole = self._lay(ALL, self.tokens, self._first(given[ATTENTION]))
        rest = [self._lay(product.name, self._first(whole)) for product in call.products]
        return CallPlan(ranges=tuple(r for ranges in (*given.values(), whole, *rest) for r in ranges))

    def _first(self, ranges: Sequence[StoredRange]) -> int:
        return min((r.start for r in ranges), default=self.tokens)

    def _lay(self, kind: str, stop: int, lowest: int = 0) -> list[StoredRange]:
        """Ranges of a kind that end at `stop`; none begins before `lowest`."""
        ranges = []
        for place, length in self._lengths(kind, stop, lowest).items():
            if length:
                ranges.append(StoredRange(kind=kind, place=place, start=stop - length, stop=stop))
                stop -= length
        return ranges[::-1]

    def _lengths(self, kind: str, stop: int, lowest: int) -> dict[Place, int]:
        shares = {place: share for place in reversed(PLACES) if (share := self.shares[kind, place]) > _NOTHING}
        if not shares:
            return {}
        first = 0 if kind in self.required else self._start(kind, stop, sum(shares.values()), lowest)
        lengths, start = {}, stop
        for place, share in shares.items():
            lengths[place] = start - max(self._start(kind, start, share, lowest), first)
            start -= lengths[place]
        taker = self.spare if self.spare in shares else max(shares, key=lambda place: shares[place])
        if taker == self.spare or kind in self.required:
            lengths[taker] += start - first
        return lengths

    def _start(self, kind: str, stop: int, share: float, lowest: int) -> int:
        tile = self.tile if kind in (INPUT, ATTENTION) else self.product_tile
        tiles = math.ceil((stop - share * self.tokens) / tile - self.missing)
        return min(max(tiles * tile, lowest), stop)


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
