"""Sentences that explain the alpha of a plan."""

from __future__ import annotations

from typing import Final

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.planner.alpha.feasibility import Feasibility
from lightning_memo.planner.alpha.largest_alpha import AlphaSolution
from lightning_memo.utils.units import format_bytes

_SLOW: Final = "copies take longer than the forward and slow the step"
_WAITS: Final = "Layers wait for the disk."


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
    parts = feasibility.costs.calls if feasibility.whole_layers else feasibility.costs.tokens
    more = min(alpha + 1 / parts, 1.0)
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
    if alpha < solution.alpha - 2 / feasibility.costs.tokens:
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
