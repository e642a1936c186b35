"""The swap plan of a run: the fraction of the tokens to swap, exact to the byte, and the expected step time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.storage_plan import StoragePlan
from lightning_memo.artifacts.swap_plan import HostBacked, PlanMemory, Schedule, SwapPlan
from lightning_memo.planner.choose_plan import plain_plan
from lightning_memo.planner.host_backed_sizes import StreamedBytes
from lightning_memo.planner.largest_alpha import AlphaSolution, Feasibility, HostMemoryError, solve_alpha
from lightning_memo.planner.step_time import steady, step_seconds, streamed_step_seconds
from lightning_memo.planner.token_slices import spread
from lightning_memo.utils.units import format_bytes

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
        host_backed: Tensors that live on the host, see `lightning_memo.artifacts.swap_plan.SwapPlan`.
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
    storage = feasibility.storage(chosen, spread(feasibility.spilled_calls(chosen) or 0, warm.swapped_calls))
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
        on_disk = feasibility.mixed(given) and feasibility.budget.spill_bytes
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
        cause = "The disk's bounce buffers take host memory" if budget.spill_bytes else "Host slots are aligned"
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
        f"Copy time{', ' if budget.spill_bytes else ' and '}{tiers} would allow alpha=1.",
    )


def _host_text(budget: Budget) -> tuple[str, str]:
    """The memory that swapped activations may fill, with its size and without."""
    memory, tiers = f"{format_bytes(budget.host_bytes)} of host memory", "host memory"
    if budget.spill_bytes:
        return f"{memory} and {format_bytes(budget.spill_bytes)} of disk", f"{tiers} and disk"
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
