"""The swap plan of a run: the fraction of the tokens to swap, exact to the byte, and the expected step time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import HostBacked, Schedule, StreamedBytes, SwapPlan
from lightning_memo.planner.alpha.alpha_reason import best_alpha_reason, given_alpha_reason, listed
from lightning_memo.planner.alpha.feasibility import Feasibility
from lightning_memo.planner.alpha.largest_alpha import TOLERANCE, HostMemoryError, solve_alpha
from lightning_memo.planner.alpha.plain_training import plain_plan
from lightning_memo.planner.alpha.step_time import steady, step_seconds


def plan_swap(
    costs: LayerCosts,
    budget: Budget,
    fingerprint: Fingerprint,
    *,
    alpha: float | str,
    schedule: Schedule,
    slice_tokens: int | None,
    slot_bytes: Callable[[float], int],
    allowed: tuple[float, ...] | None = None,
    may_be_plain: bool = True,
    host_backed: HostBacked = "none",
    streamed_bytes: Callable[[float], StreamedBytes] | None = None,
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
        slot_bytes: Returns the exact host bytes of one layer call for an alpha, alignment included; must not decrease
            with alpha.
        allowed: Fractions that the layers support; None if they support all.
        may_be_plain: Whether plain training may be chosen. It may not if it does not fit on another process.
        host_backed: Tensors that live on the host, see `lightning_memo.artifacts.swap_plan.SwapPlan`.
        streamed_bytes: Returns the exact bytes for an alpha if `host_backed` is not "none". `slot_bytes` is not
            called then.

    Raises:
        HostMemoryError: The host cannot hold the activations that have to be swapped.
        ValueError: The layers do not support the given alpha.
    """
    if alpha == "auto" and may_be_plain:
        plain = plain_plan(costs, budget, fingerprint, schedule, slice_tokens)
        if plain is not None:
            return plain
    warm = steady(costs)
    feasibility = Feasibility(warm, budget, slot_bytes, streamed_bytes, slice_tokens)
    chosen, reason = _choose_alpha(feasibility, alpha, allowed)
    swap = _swap_plan(feasibility, chosen, schedule, host_backed)
    seconds = step_seconds(warm, swap)
    return Plan(fingerprint=fingerprint, costs=costs, budget=budget, swap=swap, step_seconds=seconds, reason=reason)


def _swap_plan(feasibility: Feasibility, alpha: float, schedule: Schedule, host_backed: HostBacked) -> SwapPlan:
    sizes = None if feasibility.streamed_bytes is None else feasibility.streamed_bytes(alpha)
    swap = SwapPlan(
        mode="memo",
        alpha=alpha,
        schedule=schedule,
        slice_tokens=feasibility.slice_tokens,
        calls=feasibility.costs.calls,
        slot_bytes=feasibility.slot_bytes(alpha) if sizes is None else 0,
        spilled_calls=feasibility.spilled_calls(alpha) or 0,
    )
    if sizes is None:
        return swap
    return replace(
        swap,
        host_backed=host_backed,
        slot_bytes=sizes.slot,
        streamed_host_bytes=sizes.host,
        gradient_host_bytes=sizes.gradients,
        state_host_bytes=sizes.states,
        staging_bytes=sizes.staging,
    )


def _choose_alpha(feasibility: Feasibility, alpha: float | str, allowed: tuple[float, ...] | None) -> tuple[float, str]:
    """Returns alpha and the reason for it."""
    if alpha == "auto":
        solution = solve_alpha(feasibility.costs, feasibility.budget)
        chosen = _feasible_alpha(feasibility, solution.alpha, allowed)
        return chosen, best_alpha_reason(feasibility, solution, chosen, allowed)
    given = float(alpha)
    if allowed is not None and given not in allowed:
        raise ValueError(
            f"alpha={given:g} is not possible: the layers of this model support only alpha {listed(allowed)}; "
            'set one of these, or "auto"'
        )
    if not feasibility.fits(given):
        remedy = 'set a smaller alpha or alpha="auto", or raise host_memory'
        raise HostMemoryError(given, feasibility.host_bytes(given), feasibility.budget, remedy)
    return given, given_alpha_reason(feasibility, given)


def _feasible_alpha(feasibility: Feasibility, limit: float, allowed: tuple[float, ...] | None) -> float:
    """Largest fraction up to `limit`, in whole tokens, whose slots fit with their alignment.

    The disk also has to keep up and the device has to have room, except at the smallest fraction.
    """
    limit = min(limit + TOLERANCE, 1.0)
    if allowed is not None:
        possible = [alpha for alpha in sorted(allowed) if feasibility.fits(alpha)]
        # Exceeding the overlap limit only costs time: the layers may leave no other choice than the smallest fraction.
        if possible:
            good = [a for a in possible if a <= limit and feasibility.keeps_up(a) and feasibility.fits_device(a)]
            return max(good, default=possible[0])
        least = min(allowed)
    else:
        fitting = _fitting_tokens(feasibility, math.floor(limit * feasibility.costs.tokens))
        if fitting is not None:
            return fitting / feasibility.costs.tokens
        least = 0.0
    raise HostMemoryError(least, feasibility.host_bytes(least), feasibility.budget)


def _fitting_tokens(feasibility: Feasibility, most: int) -> int | None:
    """Largest number of tokens up to `most` that can be swapped. None if not even zero tokens fit.

    Slots grow with the tokens.
    """

    def too_many(count: int) -> bool:
        alpha = count / feasibility.costs.tokens
        keeps_up = count == 0 or (feasibility.keeps_up(alpha) and feasibility.fits_device(alpha))
        return not (feasibility.fits(alpha) and keeps_up)

    fitting = bisect_left(range(most + 1), True, key=too_many)
    return fitting - 1 if fitting else None
