"""The plan with a single alpha: the largest fraction whose copies hide and which fits (MEMO, section 4.2)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import (
    Fingerprint,
    HostBacked,
    Plan,
    PlanMemory,
    Schedule,
    StoragePlan,
    SwapPlan,
    step_device_bytes,
)
from lightning_memo.artifacts.slot_layouts import DiskLayout
from lightning_memo.planner.choose_plan import plain_plan
from lightning_memo.planner.host_backed_sizes import StreamedBytes
from lightning_memo.planner.step_time import disk_seconds, steady, step_seconds, streamed_step_seconds
from lightning_memo.planner.token_slices import plan_of_alpha, plan_of_whole_layers, spread, tile_of
from lightning_memo.utils.units import format_bytes

Binding = Literal["overlap", "host", "compression", "all tokens swapped"]
TOLERANCE: Final = 1e-6
"""Share by which a copy may take longer than its forward: measured times are far less exact."""
_MORE_HOST_MEMORY: Final = "raise host_memory or shorten the sequence"
_MORE_DISK: Final = "raise host_memory or disk_memory, or shorten the sequence"


def calls_to_spill(swapped_calls: int, slot_bytes: int, budget: Budget) -> int | None:
    """Smallest number of layer calls that have to go to the disk for the others to fit the host.

    Args:
        swapped_calls: Number of layer calls whose activations leave the device.
        slot_bytes: Bytes of each of them.
        budget: Its host bytes hold the remaining calls and the bounce buffers of the disk.

    Returns:
        The number of calls; None if host and disk together cannot hold them.
    """
    if swapped_calls * slot_bytes <= budget.host_bytes:
        return 0
    layout = DiskLayout(slot_bytes)
    room_bytes = budget.host_bytes - layout.bounce_bytes
    if room_bytes < 0:
        return None
    spilled = max(swapped_calls - room_bytes // slot_bytes, 1)
    return spilled if spilled * layout.region_bytes <= budget.disk_bytes else None


def disk_keeps_up(costs: LayerCosts, slot_bytes: int, disk_calls: int, alpha: float) -> bool:
    """Whether no layer call waits for the disk: MEMO's overlap constraint (section 4.2), applied to the disk.

    A write may last until the next spilled call is offloaded, because host buffers hold one whole call. A read starts
    when the backward two calls later has released its rounding buffer, and may last as long as the backward in between.

    Args:
        costs: Measured costs.
        slot_bytes: Bytes that one layer call swaps.
        disk_calls: Number of layer calls, evenly spaced, that go to the disk.
        alpha: Fraction of the tokens that is swapped and not recomputed.
    """
    if not disk_calls:
        return True
    swapped_calls = costs.swapped_calls
    write_seconds, read_seconds = disk_seconds(costs, slot_bytes)
    leaving = range(swapped_calls)
    forward = min(costs.forward_seconds_at(call, alpha) for call in leaving) * (swapped_calls // disk_calls)
    backward = min(costs.backward_seconds_at(call, alpha) for call in leaving)
    return write_seconds <= forward and read_seconds <= backward


class Feasibility:
    """Memory that a plan needs as a function of alpha, compared with a budget.

    Args:
        costs: Costs of the layer calls, without the outliers of a first step.
        budget: Limits of device, host and disk.
        memory_of: Returns the exact memory of a plan; not called with `streamed_bytes`.
        streamed_bytes: Returns the exact bytes of a plan where each slice swaps into a slot of its own, which never
            goes to the disk; None if whole layer calls swap.
        slice_tokens: Maximum number of tokens that run through a layer at once; None for no limit.
        whole_layers: Whether layers cannot be cut, so that alpha is a fraction of the layer calls.
        multiple: Slices begin at multiples of this many tokens.

    Attributes:
        parts: Number of steps from alpha 0 to alpha 1: of layer calls, or of the tiles of tokens that slices begin at.
    """

    def __init__(
        self,
        costs: LayerCosts,
        budget: Budget,
        memory_of: Callable[[StoragePlan], PlanMemory],
        streamed_bytes: Callable[[StoragePlan], StreamedBytes] | None,
        *,
        slice_tokens: int | None,
        whole_layers: bool,
        multiple: int,
    ) -> None:
        self.costs, self.budget, self.streamed_bytes, self.whole_layers = costs, budget, streamed_bytes, whole_layers
        self._memory_of, self._slice_tokens, self._multiple = memory_of, slice_tokens, multiple
        self._unit = math.lcm(tile_of(costs.tokens), multiple)
        self.parts = costs.calls if whole_layers else -(-costs.tokens // self._unit)
        self._known: dict[float, tuple[StoragePlan, PlanMemory]] = {}

    def alpha_at(self, part: int) -> float:
        """The fraction after a number of steps."""
        return part / self.parts if self.whole_layers else min(part * self._unit / self.costs.tokens, 1.0)

    def part_of(self, alpha: float) -> int:
        """Number of steps to the largest fraction up to `alpha`."""
        most = self.costs.calls if self.whole_layers else self.costs.tokens / self._unit
        return self.parts if alpha >= 1.0 else math.floor(min(alpha + TOLERANCE, 1.0) * most)

    def storage(self, alpha: float, spilled: Collection[int] = ()) -> StoragePlan:
        """The plan for a fraction.

        Args:
            alpha: Fraction of the tokens, or of the layer calls, that is swapped.
            spilled: Layer calls that go to the disk.
        """
        tokens, calls = self.costs.tokens, self.costs.calls
        if self.whole_layers:
            return plan_of_whole_layers(tokens, alpha, calls, spilled)
        return plan_of_alpha(
            tokens, alpha, calls, slice_tokens=self._slice_tokens, multiple=self._multiple, spilled=spilled
        )

    def memory(self, storage: StoragePlan) -> PlanMemory:
        """Exact memory of a plan."""
        return self._memory_of(storage) if self.streamed_bytes is None else self.streamed_bytes(storage).memory

    def _at(self, alpha: float) -> tuple[StoragePlan, PlanMemory]:
        """The plan for a fraction without the disk, and its memory."""
        if alpha not in self._known:
            storage = self.storage(alpha)
            self._known[alpha] = storage, self.memory(storage)
        return self._known[alpha]

    def host_bytes(self, alpha: float) -> int:
        """Bytes of all swapped activations."""
        return self._at(alpha)[1].host

    def mixed(self, alpha: float) -> bool:
        """Whether some layer calls are swapped as a whole, and the others recomputed."""
        return self.whole_layers and 0.0 < alpha < 1.0

    def disk_calls(self, alpha: float) -> int | None:
        """Smallest number of layer calls that have to go to the disk; None if host and disk cannot hold them all."""
        if self.host_bytes(alpha) <= self.budget.host_bytes:
            return 0
        if self.streamed_bytes is not None or self.mixed(alpha):
            return None
        return calls_to_spill(self.costs.swapped_calls, self._at(alpha)[1].slot, self.budget)

    def fits(self, alpha: float) -> bool:
        """Whether host and disk can hold the swapped activations."""
        return self.disk_calls(alpha) is not None

    def keeps_up(self, alpha: float) -> bool:
        """Whether no layer waits for the disk."""
        spilled = self.disk_calls(alpha)
        return not spilled or disk_keeps_up(self.costs, self._at(alpha)[1].slot, spilled, alpha)

    def device_bytes(self, alpha: float) -> int:
        """`Plan.device_bytes` of the plan.

        Grows with alpha, because buffers grow by more than recomputation shrinks, unless activations are compressed.
        """
        return self.costs.fixed_device_bytes + step_device_bytes(self.costs, *self._at(alpha))

    def fits_device(self, alpha: float) -> bool:
        """Whether the device budget holds the plan."""
        return self.device_bytes(alpha) <= self.budget.device_bytes


class HostMemoryError(ValueError):
    """The host cannot hold the activations that have to be swapped."""

    def __init__(self, alpha: float, needed_bytes: int, budget: Budget, remedy: str = "") -> None:
        disk = f", plus {format_bytes(budget.disk_bytes)} of disk" if budget.disk_bytes else ""
        super().__init__(
            f"alpha={alpha:g} swaps {format_bytes(needed_bytes)} ({needed_bytes} bytes) to the host, but the budget is "
            f"{format_bytes(budget.host_bytes)} ({budget.host_bytes} bytes) of host memory{disk}: "
            + (remedy or (_MORE_DISK if disk else _MORE_HOST_MEMORY))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaSolution:
    """The largest fraction of the tokens that can be swapped, and the constraint that limits it."""

    alpha: float
    binding: Binding
    hidden: bool
    """Whether every layer's copy fits under its forward; False only at alpha 0."""


def solve_alpha(costs: LayerCosts, budget: Budget) -> AlphaSolution:
    """Maximize alpha in [0, 1] under the overlap and host memory constraints of MEMO, section 4.2.

    For each swapped layer, `(S_input + S_attn + alpha * S_others) / B <= T_layer`; over all swapped layers,
    `sum(S_input + S_attn + alpha * S_others) <= M_host`. The last layer calls, usually two, never leave the device, so
    neither constraint includes them. B is the smaller of the two bandwidths, T_layer the forward time. With alpha as
    the only variable, the linear program's optimum is the smallest of the constraints' upper bounds. If activations are
    swapped compressed, S_others is their compressed size, T_layer grows with alpha by the time to compress them, and
    alpha is 0 where recomputation takes less time than to compress and restore them.

    Args:
        costs: Bytes and seconds of each layer call.
        budget: M_host is the sum of its host bytes and its disk bytes.

    Raises:
        HostMemoryError: The budget cannot hold the layer inputs and attention outputs (alpha = 0).
    """
    swapped = range(costs.swapped_calls)
    least_bytes = sum(costs.swapped_bytes(call, 0.0) for call in swapped)
    room_bytes = budget.host_bytes + budget.disk_bytes
    if least_bytes > room_bytes:
        raise HostMemoryError(0.0, least_bytes, budget)
    bandwidth = min(costs.offload_bytes_per_second, costs.prefetch_bytes_per_second)
    spare_bytes = [costs.forward_seconds[call] * bandwidth - costs.swapped_bytes(call, 0.0) for call in swapped]
    if any(spare < 0 for spare in spare_bytes):
        return AlphaSolution(alpha=0.0, binding="overlap", hidden=False)
    if compression_outlasts_recomputation(costs):
        return AlphaSolution(alpha=0.0, binding="compression", hidden=True)
    # The forward that compresses more lasts longer, too.
    longer_seconds = [costs.forward_seconds_at(call, 1.0) - costs.forward_seconds[call] for call in swapped]
    exposed_bytes = [
        max(costs.moved_other_bytes[call] - seconds * bandwidth, 0.0)
        for call, seconds in zip(swapped, longer_seconds, strict=True)
    ]
    overlap = min(map(_upper_bound, spare_bytes, exposed_bytes), default=math.inf)
    host = _upper_bound(room_bytes - least_bytes, sum(costs.moved_other_bytes[call] for call in swapped))
    alpha = min(overlap, host)
    if alpha >= 1.0 - TOLERANCE:
        return AlphaSolution(alpha=1.0, binding="all tokens swapped", hidden=True)
    return AlphaSolution(alpha=alpha, binding="host" if host < overlap else "overlap", hidden=True)


def compression_outlasts_recomputation(costs: LayerCosts) -> bool:
    """Return whether to compress and restore activations takes longer than to recompute them."""
    if costs.compress_seconds is None or costs.restore_seconds is None:
        return False
    return sum(costs.compress_seconds) + sum(costs.restore_seconds) > sum(costs.recompute_seconds)


def _upper_bound(room_bytes: float, other_bytes: float) -> float:
    """Largest alpha with `alpha * other_bytes <= room_bytes`."""
    return room_bytes / other_bytes if other_bytes else math.inf


_STREAMED_PARTS: Final = 16  # fractions of the largest alpha that are compared

_SLOW: Final = "copies take longer than the forward and slow the step"
_WAITS: Final = "Layers wait for the disk."


def plan_swap(
    costs: LayerCosts,
    budget: Budget,
    fingerprint: Fingerprint,
    *,
    alpha: float | str,
    schedule: Schedule,
    slice_tokens: int | None,
    memory_of: Callable[[StoragePlan], PlanMemory],
    whole_layers: bool = False,
    multiple: int = 1,
    may_be_plain: bool = True,
    host_backed: HostBacked = "none",
    streamed_bytes: Callable[[StoragePlan], StreamedBytes] | None = None,
) -> Plan:
    """Decide which activations are swapped, and compute the memory and time that this takes.

    With alpha "auto", the plan is plain training if that fits the device, otherwise the largest alpha whose copies are
    hidden and which fits host and device. The host limit is exact to the byte. A given alpha is accepted if it fits the
    host. If not even alpha 0 fits the device, the plan has alpha 0 nevertheless: the device bytes are an estimate, and
    a step has just succeeded.

    Args:
        costs: Measured costs of all layer calls that are alive at once.
        budget: Device and host bytes of this process.
        fingerprint: Identifies the run, so that a saved plan is reused only for an equal one.
        alpha: "auto", or a fraction of the tokens.
        schedule: Order in which the slices run.
        slice_tokens: Maximum number of tokens that run through a layer at once; None for no limit.
        memory_of: Returns the exact memory of a plan, alignment included. Not called with `streamed_bytes`.
        whole_layers: Whether layers cannot be cut, so that alpha is a fraction of the layer calls.
        multiple: Slices begin at multiples of this many tokens.
        may_be_plain: Whether plain training may be chosen. It may not if it does not fit on another process.
        host_backed: Tensors that live on the host, see `lightning_memo.artifacts.plan.SwapPlan`.
        streamed_bytes: Returns the exact bytes of a plan if `host_backed` is not "none".

    Raises:
        HostMemoryError: The host cannot hold the activations that have to be swapped.
    """
    if alpha == "auto" and may_be_plain:
        plain = plain_plan(costs, budget, fingerprint, schedule)
        if plain is not None:
            return plain
    warm = steady(costs)
    feasibility = Feasibility(
        warm, budget, memory_of, streamed_bytes,
        slice_tokens=slice_tokens, whole_layers=whole_layers, multiple=multiple,
    )  # fmt: skip
    chosen, reason = _choose_alpha(feasibility, alpha, schedule)
    storage = feasibility.storage(chosen, spread(feasibility.disk_calls(chosen) or 0, warm.swapped_calls))
    swap = SwapPlan(
        storage=storage,
        memory=feasibility.memory(storage),
        schedule=schedule,
        host_backed=host_backed,
        in_flight=costs.in_flight,
    )
    seconds = _seconds_at(feasibility, schedule, chosen) if streamed_bytes is not None else step_seconds(warm, swap)
    return Plan(fingerprint=fingerprint, costs=costs, budget=budget, swap=swap, step_seconds=seconds, reason=reason)


def _choose_alpha(feasibility: Feasibility, alpha: float | str, schedule: Schedule) -> tuple[float, str]:
    """Returns alpha and the reason for it."""
    if alpha == "auto":
        solution = solve_alpha(feasibility.costs, feasibility.budget)
        most = _feasible_alpha(feasibility, solution.alpha)
        if feasibility.streamed_bytes is None or most == 0.0:
            return most, best_alpha_reason(feasibility, solution, most)
        # Copies of single slices may not hide, although those of whole layers do.
        part = feasibility.part_of(most)
        fractions = (feasibility.alpha_at(part * n // _STREAMED_PARTS) for n in range(_STREAMED_PARTS, -1, -1))
        chosen = min(fractions, key=lambda fraction: _seconds_at(feasibility, schedule, fraction))
        if chosen == most:
            return most, best_alpha_reason(feasibility, solution, most)
        return chosen, sliced_alpha_reason(chosen)
    given = float(alpha)
    if not feasibility.fits(given):
        on_disk = feasibility.mixed(given) and feasibility.budget.disk_bytes
        smaller = "set alpha=1, which may use the disk," if on_disk else "set a smaller alpha"
        remedy = f'{smaller} or alpha="auto", or raise host_memory'
        raise HostMemoryError(given, feasibility.host_bytes(given), feasibility.budget, remedy)
    return given, given_alpha_reason(feasibility, given)


def _seconds_at(feasibility: Feasibility, schedule: Schedule, alpha: float) -> float:
    """Expected seconds of a step where each slice swaps by itself."""
    assert feasibility.streamed_bytes is not None
    slices = feasibility.streamed_bytes(feasibility.storage(alpha)).slices
    return streamed_step_seconds(feasibility.costs, slices, schedule)


def _feasible_alpha(feasibility: Feasibility, limit: float) -> float:
    """Largest fraction up to `limit`, in whole tokens or layer calls, whose slots fit with their alignment.

    The disk also has to keep up and the device has to have room, except at the smallest fraction. Memory grows with the
    fraction.

    Raises:
        HostMemoryError: Not even the smallest fraction fits.
    """
    parts, alpha_at = feasibility.parts, feasibility.alpha_at

    def too_many(part: int) -> bool:
        return not (feasibility.fits(alpha_at(part)) and (part == 0 or feasibility.keeps_up(alpha_at(part))))

    def too_large(part: int) -> bool:
        return part > 0 and not feasibility.fits_device(alpha_at(part))

    most = feasibility.part_of(limit)
    if most == parts:
        if not (too_many(parts) or too_large(parts)):
            return 1.0
        most -= 1  # whole layers use the disk only if all of them are swapped
    most = bisect_left(range(most + 1), True, key=too_many) - 1
    if most < 0:
        raise HostMemoryError(0.0, feasibility.host_bytes(0.0), feasibility.budget)
    # Compressed tensors in two buffers may take less of the device than the recomputed ones in their place.
    if too_large(most):
        most = bisect_left(range(most + 1), True, key=too_large) - 1
    return alpha_at(most)


def given_alpha_reason(feasibility: Feasibility, alpha: float) -> str:
    """Whether the copies of a given alpha slow the step, and whether the plan is too large for the device.

    Args:
        feasibility: Costs and budget of the step.
        alpha: Fraction of the tokens that is swapped.
    """
    copies = "copies hide under the forward" if _hidden(feasibility.costs, alpha) else _SLOW
    waits = "" if feasibility.keeps_up(alpha) else f" {_WAITS}"
    over = "" if feasibility.fits_device(alpha) else f" Device memory is short: {_overflow_text(feasibility, alpha)}."
    return f"alpha was given; {copies}.{waits}{over}"


def best_alpha_reason(feasibility: Feasibility, solution: AlphaSolution, alpha: float) -> str:
    """What limits the alpha that the planner chose.

    Args:
        feasibility: Costs and budget of the step.
        solution: Optimum under the overlap and host memory constraints.
        alpha: Fraction of the tokens that was chosen.
    """
    limit, allows = _limit_text(feasibility, solution)
    if solution.binding == "compression":
        return limit
    more = feasibility.alpha_at(min(feasibility.part_of(alpha) + 1, feasibility.parts))
    budget = feasibility.budget
    if not feasibility.keeps_up(alpha):
        return f"Disk speed is the limit: even at alpha={alpha:.4g} layers wait for the disk. {allows}"
    if not feasibility.keeps_up(more):
        return f"Disk speed is the limit: above alpha={alpha:.4g} layers would wait for the disk. {allows}"
    if not feasibility.fits_device(more):
        even = "" if feasibility.fits_device(alpha) else "even "
        return f"Device memory is the limit: {even}{_overflow_text(feasibility, alpha)}. {allows}"
    if feasibility.whole_layers and alpha < solution.alpha and not feasibility.fits(more):
        return f"Host memory is the limit: fractions of whole layers do not use a disk. {allows}"
    if feasibility.whole_layers and alpha < solution.alpha:
        return f"{limit} Layers run whole, so alpha={alpha:.4g} is a fraction of the layer calls."
    if feasibility.part_of(alpha) < feasibility.part_of(solution.alpha) - 1:
        cause = "The disk's bounce buffers take host memory" if budget.disk_bytes else "Host slots are aligned"
        otherwise = "" if solution.binding == "host" else f" {allows}"
        fits = f"alpha={alpha:.4g} is the largest that fits the budget of {_host_text(budget)[0]}"
        return f"Host memory is the limit. {cause}, so {fits}.{otherwise}"
    return limit


def sliced_alpha_reason(alpha: float) -> str:
    """Why single slices allow less than the copies of whole layers and the memory do.

    Args:
        alpha: Fraction of the tokens that was chosen.
    """
    return (
        f"Copy time is the limit: above alpha={alpha:.4g} slices would wait for the copies of the slices before them."
    )


def _limit_text(feasibility: Feasibility, solution: AlphaSolution) -> tuple[str, str]:
    """Sentences for the case that overlap or host memory limits alpha, and for the case that something else does."""
    alpha, costs, budget = f"alpha={solution.alpha:.4g}", feasibility.costs, feasibility.budget
    if costs.calls <= 2:
        text = "The last two layer calls stay on the device, and there are no others."
        return text, text
    if not solution.hidden:
        return f"Copy time is the limit: even at alpha=0 {_SLOW}.", "Copies slow the step as well."
    if solution.binding == "compression":
        text = "Recomputation is faster than to compress and restore activations, so only exact ones are swapped."
        return text, text
    if solution.binding == "overlap":
        limit = f"above {alpha} the copy of a layer would take longer than its forward"
        return f"Copy time is the limit: {limit}.", f"Copy time would allow {alpha}."
    memory, tiers = _host_text(budget)
    if solution.binding == "host":
        return (
            f"Host memory is the limit: above {alpha} the budget of {memory} would overflow.",
            f"The budget of {memory} would allow {alpha}.",
        )
    return (
        f"Nothing limits alpha: the copies of all tokens hide under the forward and fit {tiers}.",
        f"Copy time{', ' if budget.disk_bytes else ' and '}{tiers} would allow alpha=1.",
    )


def _host_text(budget: Budget) -> tuple[str, str]:
    """The memory that swapped activations may fill, with its size and without."""
    memory, tiers = f"{format_bytes(budget.host_bytes)} of host memory", "host memory"
    if budget.disk_bytes:
        return f"{memory} and {format_bytes(budget.disk_bytes)} of disk", f"{tiers} and disk"
    return memory, tiers


def _overflow_text(feasibility: Feasibility, alpha: float) -> str:
    device = format_bytes(feasibility.budget.device_bytes)
    if feasibility.fits_device(alpha):
        return f"above alpha={alpha:.4g} the {device} budget would overflow"
    return f"alpha={alpha:.4g} exceeds the {device} budget"


def _hidden(costs: LayerCosts, alpha: float) -> bool:
    bandwidth = min(costs.offload_bytes_per_second, costs.prefetch_bytes_per_second)
    return all(
        costs.swapped_bytes(call, alpha) <= costs.forward_seconds_at(call, alpha) * bandwidth
        for call in range(costs.swapped_calls)
    )
