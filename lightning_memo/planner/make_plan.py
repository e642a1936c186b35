"""The planner: returns the fastest plan that fits the memory and keeps to restrictions, with the reason for it.

Every plan says where the tensors of each layer call are stored. Plain training keeps all of them. If each kind of
tensor may have places of its own, a linear program finds them. Otherwise all tensors of a token are treated alike, by a
single alpha (MEMO, section 4.2): the fractions of the tokens, or of the layer calls if layers run whole, are compared,
or one is given. All candidates are judged by the same functions for memory, time and reason.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from lightning_memo.artifacts.costs import Budget, LayerCosts, StorageCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.prices import Price, memory_limits
from lightning_memo.artifacts.slot_layouts import DiskLayout
from lightning_memo.artifacts.swap_plan import (
    PlanMemory,
    StoragePlan,
    StreamFromHost,
    SwapPlan,
    step_device_bytes,
)
from lightning_memo.planner.explain_plan import (
    Candidate,
    alpha_reason,
    given_alpha_reason,
    plain_reason,
    price_reason,
    segments_reason,
)
from lightning_memo.planner.step_time import seconds_again, step_time, streamed_step_time
from lightning_memo.planner.storage_planner import StorageError, plan_storage
from lightning_memo.planner.streamed_bytes import StreamedBytes, with_longest_segments
from lightning_memo.planner.token_slices import (
    plan_of_alpha,
    plan_of_plain_training,
    plan_of_whole_layers,
    spread,
    tile_of,
    with_common_bounds,
)
from lightning_memo.utils.units import format_bytes

Seconds = tuple[float, float]
"""Expected seconds of a step by kinds of tensors, and by a single alpha."""

# The rest of the free device memory is left to workspaces of kernels and to what the allocator rounds up and fragments.
_USABLE_SHARE: Final = 0.96
# Kept tensors fill the memory that is left then, while allocators fragment.
_USABLE_SHARE_FOR_KEPT: Final = 0.9
# Alignment adds less than 1 %, for which the second attempt leaves room. The share of the bounce buffers depends on the
# spilled bytes; a few more attempts find both.
_ATTEMPTS: Final = 10
# Bounce buffers are never smaller than the bytes that a layer call spills.
_LEAST_BOUNCE_SHARE: Final = 1.0
_FRACTIONS: Final = 32
"""Parts into which the interval of alpha is divided; intervals beside the best bound are halved from there on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restrictions:
    """What a plan has to keep to."""

    alpha: float | str = "auto"
    """Fraction of the tokens that is swapped, or of the layer calls if layers run whole; "auto" for the fastest one."""

    most_alpha: float = 1.0
    """Upper limit of alpha."""

    may_be_plain: bool = True
    """Whether plain training may be chosen with alpha "auto". It may not if it does not fit on another process."""

    joint_attention: bool = False
    """Whether attention of a layer runs over all of its slices at once. Attention outputs are then not recomputed."""

    slice_tokens: int | None = None
    """Maximum number of tokens that run through a layer at once; None for no limit."""

    multiple: int = 1
    """Slices begin at multiples of this many tokens."""

    whole_layers: bool = False
    """Whether layers cannot be cut."""

    stream_from_host: StreamFromHost = "none"
    """Tensors that live on the host, see `lightning_memo.artifacts.swap_plan.SwapPlan`."""

    may_run_again: bool = False
    """Whether layer calls may run again in the backward, attention included, if the host cannot hold what all of them
    store with alpha 0. Hidden states have to be on the host."""

    segment_calls: int | None = None
    """Size of the segments that other processes run again, see `lightning_memo.artifacts.swap_plan.StoragePlan`; alpha
    is 0 then."""

    kinds: StorageCosts | None = None
    """Costs of each kind of tensor, if each may have places of its own; alpha is "auto" then."""

    common_bounds: Collection[int] | None = None
    """With `kinds`, where slices of other processes end, if all layer calls run in the same slices as these; None if
    each may be cut by itself."""


class HostMemoryError(ValueError):
    """The host cannot hold the activations that have to be swapped.

    Args:
        alpha: Fraction that is swapped.
        memory: Memory of the plan without the disk.
        budget: Memory of the process.
        smaller: What to set instead of a given alpha; empty if alpha is not given, or cannot be smaller.
    """

    def __init__(self, alpha: float, memory: PlanMemory, budget: Budget, smaller: str = "") -> None:
        disk, more = "", "host_memory"
        if budget.disk_bytes:
            buffers = DiskLayout(memory.slot).bounce_bytes
            disk = f", plus {format_bytes(budget.disk_bytes)} of disk, whose buffers take {format_bytes(buffers)} of it"
            if buffers < budget.host_bytes:  # otherwise, no disk is large enough
                more = "host_memory or disk_memory"
        super().__init__(
            f"alpha={alpha:g} swaps {format_bytes(memory.host)} ({memory.host} bytes) to the host, but the budget is "
            f"{format_bytes(budget.host_bytes)} ({budget.host_bytes} bytes) of host memory{disk}: "
            f"{smaller}raise {more}, or shorten the sequence"
        )


def make_plan(
    costs: LayerCosts,
    budget: Budget,
    fingerprint: Fingerprint,
    restrictions: Restrictions,
    sizes_of: Callable[[StoragePlan], PlanMemory | StreamedBytes],
) -> Plan:
    """Return the fastest plan that fits the budget, and compute the memory and time that it takes.

    All limits are exact to the byte. Plans with a single alpha have to fit host and disk. If not even alpha 0 fits the
    device, the plan has alpha 0 nevertheless, and a given alpha is accepted: the device bytes are an estimate, and a
    step has just succeeded.

    Args:
        costs: Measured costs of all layer calls that are alive at once.
        budget: Device, host and disk bytes of this process.
        fingerprint: Identifies the run, so that a saved plan is reused only for an equal one.
        restrictions: What the plan has to keep to.
        sizes_of: Returns the exact memory of a plan, alignment included, with its slices if each swaps by itself.

    Raises:
        HostMemoryError: The host cannot hold the activations that have to be swapped.
        StorageError: With `kinds`, the budget cannot hold the tensors that have to be stored.
    """
    if restrictions.alpha == "auto" and restrictions.may_be_plain:
        plain = plain_plan(costs, budget, fingerprint)
        if plain is not None:
            return plain
    search = (_Fractions if restrictions.kinds is None else _Kinds)(costs, restrictions, sizes_of)
    found = search.best(budget)
    plan = Plan(
        fingerprint=fingerprint,
        costs=costs,
        budget=budget,
        swap=found.swap,
        step_seconds=found.time.seconds,
        reason=found.reason,
        storage_costs=restrictions.kinds and restrictions.kinds.of_plan(found.swap.storage.call_classes),
        prices=found.prices,
    )
    return plan if restrictions.kinds is None else replace(plan, reason=price_reason(plan))


def plain_plan(costs: LayerCosts, budget: Budget, fingerprint: Fingerprint) -> Plan | None:
    """Return a plan that swaps and recomputes nothing. No other one is faster.

    Args:
        costs: Measured costs of all layer calls that are alive at once.
        budget: Only the device bytes count.
        fingerprint: Run on which the costs were measured.

    Returns:
        The plan; None if it does not fit the device.
    """
    storage, memory = plan_of_plain_training(costs.tokens, costs.calls), PlanMemory(kept=costs.skeletal_bytes)
    needed_bytes = costs.fixed_device_bytes + step_device_bytes(costs, storage, memory)
    if needed_bytes > budget.device_bytes:
        return None
    return Plan(
        fingerprint=fingerprint,
        costs=costs,
        budget=budget,
        swap=SwapPlan(storage=storage, memory=memory, in_flight=costs.in_flight),
        step_seconds=step_time(StorageCosts.of_layers(costs), storage).seconds,
        reason=plain_reason(needed_bytes, budget),
    )


def choose_plan(
    by_kind: Plan | None,
    by_alpha: Callable[[], Plan],
    *,
    device_measured: bool,
    slowest: Callable[[Seconds], Seconds] = lambda seconds: seconds,
) -> Plan:
    """Return plain training if that fits, otherwise the faster of two plans with other restrictions.

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
    return of_alpha if _rounded(alpha_seconds) < _rounded(kind_seconds) else by_kind


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


class _Search:
    """Searches the fastest candidate that fits.

    Args:
        costs: Costs of all layer calls. Times of calls of the same sizes are replaced by their median: in a first step,
            kernels are selected and pages are touched for the first time, which slows down single calls.
        restrictions: What plans have to keep to.
        sizes_of: Returns the memory of a plan.
    """

    def __init__(
        self,
        costs: LayerCosts,
        restrictions: Restrictions,
        sizes_of: Callable[[StoragePlan], PlanMemory | StreamedBytes],
    ) -> None:
        self._restrictions, self._sizes_of = restrictions, sizes_of
        self._costs = restrictions.kinds or StorageCosts.of_layers(costs)

    def best(self, budget: Budget) -> Candidate:
        """The fastest candidate that fits. It may be one without the disk, which needs no bounce buffers."""
        found: list[Candidate] = []
        refused: ValueError | None = None
        for limits in (budget, replace(budget, disk_bytes=0)) if budget.disk_bytes else (budget,):
            try:
                found.append(self._within(limits))
            except (HostMemoryError, StorageError) as error:
                refused = refused or error
            if found and not found[0].swap.disk_bytes:
                break
        if not found:
            raise refused or AssertionError
        return min(reversed(found), key=_order)  # of two equally fast ones the one without the disk

    def _within(self, budget: Budget) -> Candidate:
        raise NotImplementedError

    def _judge(self, storage: StoragePlan, budget: Budget) -> Candidate:
        """Memory and time of a plan."""
        costs, sizes, restrictions = self._costs, self._sizes_of(storage), self._restrictions
        if isinstance(sizes, StreamedBytes):
            memory, time = (
                sizes.memory,
                streamed_step_time(costs, sizes.slices, restrictions.stream_from_host == "model", storage.calls_again),
            )
        else:
            memory, time = sizes, step_time(costs, storage, spread=self._restrictions.kinds is None)
        swap = SwapPlan(
            storage=storage,
            memory=memory,
            joint_attention=restrictions.joint_attention,
            stream_from_host=restrictions.stream_from_host,
            in_flight=costs.in_flight,
        )
        recomputed = storage.recomputed_bytes([costs.classes[number].other_bytes for number in costs.call_classes])
        working = costs.working_bytes_with(recomputed) + swap.memory.buffer_bytes + memory.kept
        device_bytes = costs.fixed_device_bytes + working
        needs = memory_limits(Budget(device_bytes=device_bytes, host_bytes=swap.host_bytes, disk_bytes=swap.disk_bytes))
        limits = memory_limits(budget)
        over = {resource: size - limits[resource] for resource, size in needs.items() if size > limits[resource]}
        return Candidate(swap=swap, time=time, over=over)


def _order(found: Candidate) -> tuple[float, ...]:
    """Sort key of candidates: those that fit host and disk come first, then those that fit the device, then fast ones.

    Of those that do not fit the device the one of alpha 0 comes first, by which the profiled step has run.
    """
    device = found.over.get("device memory", 0)
    last = found.swap.alpha if device else _rounded(found.time.seconds)
    return sum(found.over.values()) - device, float(device > 0), last


def _rounded(seconds: float) -> float:
    """The same number for times that differ by rounding errors: plans that recompute nothing take equally long."""
    return float(f"{seconds:.9e}")


class _Kinds(_Search):
    """Plans by which each kind of tensor has places of its own."""

    def _within(self, budget: Budget) -> Candidate:
        """The best plan whose exact bytes fit: the last attempt's excess lowers the limits of the next attempt."""
        limits, share, bounds = budget, _LEAST_BOUNCE_SHARE, self._restrictions.common_bounds
        for _ in range(_ATTEMPTS):
            made = plan_storage(
                self._costs,
                limits,
                tile_tokens=tile_of(self._costs.tokens),
                may_drop_attention=not self._restrictions.joint_attention,
                bounce_share=share,
            )
            storage = made.storage if bounds is None else with_common_bounds(made.storage, bounds)
            found = self._judge(storage, budget)
            if not found.over:
                return replace(found, prices=_prices_of(made.prices, budget))
            last, over, layout = (limits, share), dict(found.over), found.swap.disk_layout
            if found.swap.disk_bytes and layout.bounce_bytes > share * layout.slot_bytes:
                share = layout.bounce_bytes / layout.slot_bytes
                over.pop("host memory", None)  # with larger bounce buffers it may fit
            limits = Budget(
                device_bytes=_reduced(limits.device_bytes, made.needs.device_bytes, over.get("device memory", 0)),
                host_bytes=_reduced(limits.host_bytes, made.needs.host_bytes, over.get("host memory", 0)),
                disk_bytes=_reduced(limits.disk_bytes, made.needs.disk_bytes, over.get("disk space", 0)),
            )
            if last == (limits, share):
                break
        on_disk = f", {format_bytes(budget.disk_bytes)} of disk" if budget.disk_bytes else ""
        raise StorageError(
            f"the tensors that have to be stored do not fit {format_bytes(budget.host_bytes)} of host memory{on_disk} "
            f"and {format_bytes(budget.device_bytes)} of device memory: raise host_memory or device_memory"
        )


def _prices_of(prices: Iterable[Price], budget: Budget) -> tuple[Price, ...]:
    """The prices with the whole budget as limits."""
    limits = memory_limits(budget)
    return tuple(replace(price, limit=limits.get(price.resource, price.limit)) for price in prices)


def _reduced(limit: int, needed: int, excess: int) -> int:
    """The limit of the next attempt, below the bytes that the last attempt needed without alignment."""
    return max(min(limit - excess, needed - 1), 0) if excess else limit


class _Fractions(_Search):
    """Plans with a single alpha: a fraction of the tokens, in whole tiles, or of the layer calls."""

    def _within(self, budget: Budget) -> Candidate:
        limits = self._restrictions
        if limits.segment_calls is not None:
            return self._in_segments(self._at(0.0, budget), budget)
        if limits.alpha != "auto":
            return self._given(min(float(limits.alpha), limits.most_alpha), budget)
        unit, tokens = math.lcm(tile_of(self._costs.tokens), limits.multiple), self._costs.tokens
        parts = self._costs.calls if limits.whole_layers else -(-tokens // unit)
        known: dict[int, Candidate] = {}

        def alpha_of(part: int) -> float:
            return part / parts if limits.whole_layers else min(part * unit / tokens, 1.0)

        def judged(part: int) -> Candidate:
            if part not in known:
                known[part] = self._at(alpha_of(part), budget)
            return known[part]

        if judged(0).over.keys() - {"device memory"}:  # larger fractions need more
            return self._in_segments(judged(0), budget)
        most = bisect_right(range(parts + 1), limits.most_alpha, key=alpha_of) - 1
        step = max(-(-most // _FRACTIONS), 1)
        tried: Iterable[int] = (*range(0, most, step), most)
        while True:
            chosen = min(tried, key=lambda part: _order(judged(part)))
            if step == 1:
                break
            step = -(-step // 2)
            tried = max(chosen - step, 0), chosen, min(chosen + step, most)
        found, alpha = judged(chosen), alpha_of(chosen)
        more = judged(chosen + 1) if chosen < most else None
        return replace(found, reason=alpha_reason(found, more, alpha, budget))

    def _in_segments(self, found: Candidate, budget: Budget) -> Candidate:
        """The plan for alpha 0 whose layer calls run again in segments, because the host cannot hold all of them.

        Raises:
            HostMemoryError: It cannot hold those of segments either, or layers cannot run again.
        """

        def fits(storage: StoragePlan) -> bool:
            return "host memory" not in self._judge(storage, budget).over

        plan, given = found.swap.storage, self._restrictions.segment_calls
        if given is not None:
            plan = replace(plan, segment_calls=given)
            if not fits(plan):
                raise HostMemoryError(0.0, self._judge(plan, budget).swap.memory, budget)
        elif self._restrictions.may_run_again:
            plan = with_longest_segments(plan, fits) or plan
        if not plan.calls_again:
            raise HostMemoryError(0.0, found.swap.memory, budget)
        found = self._judge(plan, budget)
        return replace(found, reason=segments_reason(found, seconds_again(self._costs, plan.calls_again), budget))

    def _given(self, alpha: float, budget: Budget) -> Candidate:
        found = self._at(alpha, budget)
        if alpha == 0.0 and "host memory" in found.over and self._restrictions.may_run_again:
            return self._in_segments(found, budget)
        if found.over.keys() - {"device memory"}:
            smaller = 'set a smaller alpha or alpha="auto", ' if alpha else ""
            if self._is_mixed(alpha) and budget.disk_bytes:
                smaller = 'set alpha=1, which may use the disk, or alpha="auto", '
            raise HostMemoryError(alpha, found.swap.memory, budget, smaller)
        return replace(found, reason=given_alpha_reason(found, alpha, budget))

    def _is_mixed(self, alpha: float) -> bool:
        """Whether some layer calls are swapped as a whole, and the others recomputed."""
        return self._restrictions.whole_layers and 0.0 < alpha < 1.0

    def _at(self, alpha: float, budget: Budget) -> Candidate:
        """The plan for a fraction, with as few layer calls on the disk as possible."""
        found = self._judge(self._storage(alpha), budget)
        if "host memory" not in found.over or found.swap.streamed or self._is_mixed(alpha):
            return found
        leaving = found.swap.swapped_calls
        spilled = _calls_on_disk(leaving, found.swap.memory.slot, budget)
        return found if spilled is None else self._judge(self._storage(alpha, spread(spilled, leaving)), budget)

    def _storage(self, alpha: float, spilled: Collection[int] = ()) -> StoragePlan:
        tokens, calls, limits = self._costs.tokens, self._costs.calls, self._restrictions
        if limits.whole_layers:
            return plan_of_whole_layers(tokens, alpha, calls, spilled)
        return plan_of_alpha(
            tokens, alpha, calls, slice_tokens=limits.slice_tokens, multiple=limits.multiple, spilled=spilled
        )


def _calls_on_disk(swapped_calls: int, slot_bytes: int, budget: Budget) -> int | None:
    """Return the smallest number of layer calls that have to go to the disk for the others to fit the host.

    Args:
        swapped_calls: Number of layer calls whose activations leave the device.
        slot_bytes: Bytes of each of them.
        budget: Its host bytes hold the remaining calls and the bounce buffers of the disk.

    Returns:
        The number of calls; None if host and disk together cannot hold them.
    """
    layout = DiskLayout(slot_bytes)
    room_bytes = budget.host_bytes - layout.bounce_bytes
    if room_bytes < 0:
        return None
    spilled = max(swapped_calls - room_bytes // slot_bytes, 1)
    return spilled if spilled * layout.region_bytes <= budget.disk_bytes else None
