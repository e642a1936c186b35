"""What limits a plan, in sentences and as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.costs import Budget
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.prices import Price, Resource, ResourceSensitivity
from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.planner.step_time import StepTime
from lightning_memo.utils.units import format_bytes, format_seconds

_LEAST_PERCENT: Final = 0.1
"""Gain in percent of a step below which a resource is not told."""
_LEAST_WAIT: Final = 1e-6
"""Share of a step below which waits are not told: measured times are far less exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that was judged, and what the planner knows about it."""

    swap: SwapPlan
    time: StepTime
    over: dict[Resource, int]
    """Bytes by which memories that are too small exceed their budget."""

    reason: str = ""
    prices: tuple[Price, ...] = ()


def plain_reason(needed_bytes: int, budget: Budget) -> str:
    """Return why plain training is chosen.

    Args:
        needed_bytes: Device bytes that it needs.
        budget: Memory of the process.
    """
    return f"Plain training needs {format_bytes(needed_bytes)} of {format_bytes(budget.device_bytes)} of device memory."


def given_alpha_reason(found: Candidate, alpha: float, budget: Budget) -> str:
    """Return whether the copies of a given alpha slow the step, and whether the plan is too large for the device.

    Args:
        found: The plan.
        alpha: Fraction that was given.
        budget: Memory of the process.
    """
    waits = _waits(found.time) or "Its copies hide behind the computation."
    over = f" Device memory is short: {_exceeds(alpha, budget)}." if found.over else ""
    return f"You set alpha={alpha:.4g}. {waits}{over}"


def alpha_reason(found: Candidate, more: Candidate | None, alpha: float, budget: Budget) -> str:
    """Return what limits the alpha that is the fastest, and what the step waits for.

    Args:
        found: The plan.
        more: The plan for the next larger fraction; None if there is none.
        alpha: Fraction that was chosen.
        budget: Memory of the process.
    """
    limit = _alpha_limit(found, more, alpha, budget)
    return " ".join(filter(None, (limit, _waits(found.time))))


def segments_reason(found: Candidate, again_seconds: float, budget: Budget) -> str:
    """Return why layer calls run again in the backward, and how long that takes.

    Args:
        found: The plan.
        again_seconds: Seconds of the forwards that run again.
        budget: Memory of the process.
    """
    storage, over = found.swap.storage, ""
    if "device memory" in found.over:
        over = f" Device memory is short: {_exceeds(0.0, budget)}."
    limit = (
        f"Host memory is the limit: with alpha=0 the budget of {_host_text(budget)} would overflow, so the first "
        f"{storage.calls_again} of {found.swap.calls} layer calls store one input for each {storage.segment_calls} of "
        f"them, and run again in the backward, attention included ({format_seconds(again_seconds)})."
    )
    return " ".join(filter(None, (limit + over, _waits(found.time))))


def _alpha_limit(found: Candidate, more: Candidate | None, alpha: float, budget: Budget) -> str:
    if not found.swap.swapped_calls:
        return "The last two layer calls stay on the device, and there are no others."
    if found.over:
        return f"Device memory is the limit: even {_exceeds(alpha, budget)}."
    if alpha >= 1.0:
        return "Nothing limits alpha: the activations of all tokens are swapped."
    if more is None:
        return f"Device memory is the limit: a step with more than alpha={alpha:.4g} has run out of it."
    if "device memory" in more.over:
        device = format_bytes(budget.device_bytes)
        return f"Device memory is the limit: above alpha={alpha:.4g} the {device} budget would overflow."
    if more.over:
        where = f"the budget of {_host_text(budget)} would overflow"
        return f"{_host_limit(more, budget)}: above alpha={alpha:.4g} {where}."
    grown = {resource: more.time.waits[resource] - found.time.waits.get(resource, 0.0) for resource in more.time.waits}
    slowest = max(grown, key=lambda resource: grown[resource], default=None)
    waits = sum(more.time.waits.values()) - sum(found.time.waits.values())
    if slowest is None or more.time.seconds - found.time.seconds >= waits:  # less recomputation saves nothing
        return f"Recomputation is faster than to swap more than alpha={alpha:.4g}."
    where = "Disk speed" if slowest.startswith("disk") else "Copy time"
    return f"{where} is the limit: above alpha={alpha:.4g} a step would wait longer than recomputation takes."


def _host_limit(more: Candidate, budget: Budget) -> str:
    if not budget.disk_bytes:
        return "Host memory is the limit"
    whole = len(more.swap.storage.calls) > 1 and not more.swap.disk_calls
    return "Host memory is the limit" + (", as fractions of whole layers do not use a disk" if whole else "")


def _host_text(budget: Budget) -> str:
    memory = f"{format_bytes(budget.host_bytes)} of host memory"
    return f"{memory} and {format_bytes(budget.disk_bytes)} of disk" if budget.disk_bytes else memory


def _exceeds(alpha: float, budget: Budget) -> str:
    return f"alpha={alpha:.4g} exceeds the {format_bytes(budget.device_bytes)} budget"


def _waits(time: StepTime) -> str:
    """What a step waits for; empty if it does not wait."""
    disk = sum(seconds for resource, seconds in time.waits.items() if resource.startswith("disk"))
    copies = sum(time.waits.values()) - disk
    parts = [
        f"{format_seconds(seconds)} for {what}"
        for seconds, what in ((copies, "copies"), (disk, "the disk"))
        if seconds > _LEAST_WAIT * time.seconds
    ]
    return f"A step waits {' and '.join(parts)}." if parts else ""


def price_reason(plan: Plan) -> str:
    """Return one sentence for each resource that limits a plan with prices.

    Args:
        plan: The plan.
    """
    time = "a step" if plan.swap.in_flight is None else "the time of this stage"
    binding = [row for row in plan.sensitivities if row.binds]
    if not binding:
        return f"Nothing limits {time}: all copies hide behind the computation."
    worth = [row for row in binding if row.percent >= _LEAST_PERCENT]
    if not worth:
        what = " and ".join(row.resource for row in binding).capitalize()
        units = " or ".join(dict.fromkeys(row.unit for row in binding))
        return f"{what} limit {time}, and 1 {units} more would make it less than {_LEAST_PERCENT} % shorter."
    return " ".join(_sentence(row, time) for row in worth)


def _sentence(row: ResourceSensitivity, time: str) -> str:
    more = f"with 1 {row.unit} more, {time} would be up to {format_seconds(row.seconds)} ({row.percent:.1f} %) shorter"
    return f"{row.resource[0].upper()}{row.resource[1:]} is a limit: {more}."
