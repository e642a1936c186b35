"""Which fraction of the tokens is swapped: the linear program of MEMO, section 4.2, and the plan made from it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_memo.artifacts.plan import (
    Budget,
    Fingerprint,
    HostBacked,
    LayerCosts,
    Plan,
    Schedule,
    StreamedBytes,
    SwapPlan,
)
from lightning_memo.planner.alpha.host_room import Room
from lightning_memo.planner.alpha.plain_training import plain_plan
from lightning_memo.planner.alpha.step_time import steady, step_seconds
from lightning_memo.planner.linear_program import LinearProgram
from lightning_memo.utils.units import format_bytes

Binding = Literal["overlap", "host", "all tokens swapped"]

_MORE_HOST_MEMORY: Final = "raise host_memory or shorten the sequence"
_MORE_DISK: Final = "raise host_memory or spill_memory, or shorten the sequence"
_BytesOfAlpha = Callable[[float], int]
# HiGHS meets rows within a tolerance, so what it calls the best alpha can be this far from it.
_TOLERANCE: Final = 1e-6


class HostMemoryError(ValueError):
    """The host can't hold what has to be swapped."""

    def __init__(self, alpha: float, needed_bytes: int, budget: Budget, remedy: str = "") -> None:
        disk = f", and the disk {format_bytes(budget.spill_bytes)}" if budget.spill_bytes else ""
        super().__init__(
            f"alpha={alpha:g} swaps {format_bytes(needed_bytes)} ({needed_bytes} bytes) to the host, which has "
            f"{format_bytes(budget.host_bytes)} ({budget.host_bytes} bytes) for it{disk}: "
            + (remedy or (_MORE_DISK if disk else _MORE_HOST_MEMORY))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaSolution:
    """The largest fraction of the tokens that can be swapped, and what limits it."""

    alpha: float
    binding: Binding
    hidden: bool
    """Whether every layer's copy fits under its forward; False only at alpha 0."""


def solve_alpha(costs: LayerCosts, budget: Budget) -> AlphaSolution:
    """Maximise alpha in [0, 1] under MEMO's overlap and host constraints (section 4.2), with HiGHS.

    For each layer that is swapped, `(S_input + S_attn + alpha * S_others) / B <= T_layer`; over all of them,
    `sum(S_input + S_attn + alpha * S_others) <= M_host`. The last two layer calls never leave the device, so neither
    constraint covers them. B is the smaller of the two bandwidths, T_layer the forward time.

    Args:
        costs: bytes and seconds of each layer call.
        budget: M_host is its host bytes and those of the disk, if there is one.

    Raises:
        HostMemoryError: they can't even hold layer inputs and attention outputs (alpha = 0).
        RuntimeError: HiGHS failed.
    """
    swapped = range(max(costs.calls - 2, 0))
    least_bytes = sum(costs.swapped_bytes(call, 0.0) for call in swapped)
    room_bytes = budget.host_bytes + budget.spill_bytes
    if least_bytes > room_bytes:
        raise HostMemoryError(0.0, least_bytes, budget)
    bandwidth = min(costs.offload_bytes_per_second, costs.prefetch_bytes_per_second)
    rows = [
        (costs.other_bytes[call], costs.forward_seconds[call] * bandwidth - costs.swapped_bytes(call, 0.0))
        for call in swapped
    ]
    if any(room < 0 for _, room in rows):
        return AlphaSolution(alpha=0.0, binding="overlap", hidden=False)
    rows.append((sum(other for other, _ in rows), room_bytes - least_bytes))
    alpha, tight = _maximise(rows)
    if alpha >= 1.0 - _TOLERANCE:
        return AlphaSolution(alpha=1.0, binding="all tokens swapped", hidden=True)
    return AlphaSolution(alpha=alpha, binding="host" if tight == len(rows) - 1 else "overlap", hidden=True)


def _maximise(rows: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Maximise alpha in [0, 1] with `other_bytes * alpha <= room_bytes` for each row.

    Returns:
        Alpha, and the index of the row that limits it most.
    """
    program = LinearProgram()
    alpha = program.column(0.0, 1.0)
    program.minimise({alpha: -1.0})
    limits = [program.row({alpha: float(other_bytes)}, most=float(room_bytes)) for other_bytes, room_bytes in rows]
    if not program.solve():
        raise RuntimeError("HiGHS found no alpha, though alpha = 0 fits")
    prices = [abs(program.dual(row)) * other_bytes for row, (other_bytes, _) in zip(limits, rows, strict=True)]
    return min(max(program.values[alpha], 0.0), 1.0), max(range(len(rows)), key=prices.__getitem__)


def plan_swap(
    costs: LayerCosts,
    budget: Budget,
    fingerprint: Fingerprint,
    *,
    alpha: float | str,
    schedule: Schedule,
    slice_tokens: int | None,
    slot_bytes: _BytesOfAlpha,
    allowed: tuple[float, ...] | None = None,
    may_be_plain: bool = True,
    host_backed: HostBacked = "none",
    streamed_bytes: Callable[[float], StreamedBytes] | None = None,
) -> Plan:
    """Decide what is swapped and what that costs.

    With alpha "auto", plain training is chosen if it fits the device, else the largest alpha that hides its copies
    and fits host and device; the host limit is kept to the byte. A given alpha is taken if it fits the host. Where not
    even alpha 0 fits the device it is taken all the same: the device's need is an estimate, and a step has just run.

    Args:
        costs: as measured; all its layer calls are alive at once.
        budget: device and host bytes of this process.
        fingerprint: what the costs were measured on.
        alpha: "auto", or a fraction of the tokens.
        schedule: order in which the slices run.
        slice_tokens: most tokens that run through a layer at once; None: no limit.
        slot_bytes: exact host bytes of one layer call for an alpha, alignment included; must not fall as alpha grows.
        allowed: the only fractions that the layers support; None: all.
        may_be_plain: whether plain training is a choice; it is not if another process has no room for it.
        host_backed: see `lightning_memo.artifacts.plan.SwapPlan`.
        streamed_bytes: exact bytes for an alpha, where `host_backed` is not "none"; `slot_bytes` is not asked then.

    Raises:
        HostMemoryError: the host can't hold what has to be swapped.
        ValueError: a given alpha that the layers don't support.
    """
    if alpha == "auto" and may_be_plain:
        plain = plain_plan(costs, budget, fingerprint, schedule, slice_tokens)
        if plain is not None:
            return plain
    warm = steady(costs)
    room = Room(warm, budget, slot_bytes, streamed_bytes, slice_tokens)
    if alpha == "auto":
        chosen, reason = _best_alpha(warm, room, allowed)
    else:
        chosen, reason = _given_alpha(warm, room, float(alpha), allowed)
    swap = SwapPlan(
        mode="memo", alpha=chosen, schedule=schedule, slice_tokens=slice_tokens, calls=costs.calls,
        slot_bytes=slot_bytes(chosen) if streamed_bytes is None else 0, spilled_calls=room.spilled_calls(chosen) or 0,
    )  # fmt: skip
    if streamed_bytes is not None:
        swap = _streamed(swap, host_backed, streamed_bytes(chosen))
    return Plan(
        fingerprint=fingerprint,
        costs=costs,
        budget=budget,
        swap=swap,
        step_seconds=step_seconds(warm, swap),
        reason=reason,
    )


def _streamed(swap: SwapPlan, host_backed: HostBacked, sizes: StreamedBytes) -> SwapPlan:
    return replace(
        swap,
        host_backed=host_backed,
        slot_bytes=sizes.slot,
        streamed_host_bytes=sizes.host,
        gradient_host_bytes=sizes.gradients,
        state_host_bytes=sizes.states,
        staging_bytes=sizes.staging,
    )


def _given_alpha(costs: LayerCosts, room: Room, alpha: float, allowed: tuple[float, ...] | None) -> tuple[float, str]:
    if allowed is not None and alpha not in allowed:
        raise ValueError(
            f'alpha={alpha:g} is not possible, as the layers allow only {_listed(allowed)}: give one, or "auto"'
        )
    if not room.fits(alpha):
        remedy = 'set a smaller alpha or alpha="auto", or raise host_memory'
        raise HostMemoryError(alpha, room.host_bytes(alpha), room.budget, remedy)
    slow = "" if room.keeps_up(alpha) else "; layers wait for the disk"
    return alpha, f"alpha was given; {_overlap_clause(costs, alpha)}{slow}."


def _best_alpha(costs: LayerCosts, room: Room, allowed: tuple[float, ...] | None) -> tuple[float, str]:
    budget = room.budget
    solution = solve_alpha(costs, budget)
    fitting = _fitting_alpha(costs, room, solution.alpha, allowed)
    more = min(fitting + 1 / costs.tokens, 1.0)
    host, tiers = f"the host budget of {format_bytes(budget.host_bytes)}", "the host"
    if budget.spill_bytes:
        host, tiers = f"{host} and the disk's of {format_bytes(budget.spill_bytes)}", "host and disk"
    limits = {
        "overlap": f"Above alpha={solution.alpha:.4g} a layer's copy would outlast its forward",
        "host": f"Above alpha={solution.alpha:.4g} {host} would overflow",
        "all tokens swapped": f"The copies of all tokens hide under the forward and fit {tiers}",
    }
    if costs.calls <= 2:
        reason = "The last two layer calls stay on the device, and there are no others"
    elif not solution.hidden:
        reason = f"Even at alpha=0 {_overlap_clause(costs, 0.0)}"
    else:
        reason = limits[solution.binding]
    if allowed is not None:
        reason += f"; the layers allow only {_listed(allowed)}"
    elif not room.keeps_up(fitting):
        reason += "; layers wait for the disk"
    elif not room.keeps_up(more):
        reason += f"; above alpha={fitting:.4g} layers would wait for the disk"
    elif not room.fits_device(more):
        reason += f"; above alpha={fitting:.4g} the device budget of {format_bytes(budget.device_bytes)} would overflow"
    elif fitting < solution.alpha - 2 / costs.tokens:
        why = "the way to the disk takes host memory, too" if budget.spill_bytes else "host slots are aligned"
        reason += f"; {why}, so alpha={fitting:.4g} is what fits"
    return fitting, reason + "."


def _fitting_alpha(costs: LayerCosts, room: Room, limit: float, allowed: tuple[float, ...] | None) -> float:
    """Largest fraction up to `limit` whose slots, alignment included, find room, in whole tokens.

    The disk has to keep up, and the device to have room as well, unless the least fraction is too much already.
    """
    limit = min(limit + _TOLERANCE, 1.0)
    if allowed is not None:
        possible = [alpha for alpha in sorted(allowed) if room.fits(alpha)]
        # The overlap limit only costs time, so the smallest fraction may pass it where the layers leave no choice.
        if possible:
            good = [a for a in possible if a <= limit and room.keeps_up(a) and room.fits_device(a)]
            return max(good, default=possible[0])
        least = min(allowed)
    else:
        # Slots grow with alpha, so the first count of tokens that doesn't fit is found by bisection.
        def too_many(count: int) -> bool:
            alpha = count / costs.tokens
            return not room.fits(alpha) or (count > 0 and not (room.keeps_up(alpha) and room.fits_device(alpha)))

        fitting = bisect_left(range(math.floor(limit * costs.tokens) + 1), True, key=too_many)
        if fitting:
            return (fitting - 1) / costs.tokens
        least = 0.0
    raise HostMemoryError(least, room.host_bytes(least), room.budget)


def _overlap_clause(costs: LayerCosts, alpha: float) -> str:
    bandwidth = min(costs.offload_bytes_per_second, costs.prefetch_bytes_per_second)
    hidden = all(
        costs.swapped_bytes(call, alpha) <= costs.forward_seconds[call] * bandwidth for call in range(costs.calls - 2)
    )
    return "copies hide under the forward" if hidden else "copies outlast the forward and slow the step"


def _listed(allowed: tuple[float, ...]) -> str:
    return " or ".join(f"{alpha:g}" for alpha in sorted(allowed))
