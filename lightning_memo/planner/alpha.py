"""Which fraction of the tokens is swapped: the linear program of MEMO, section 4.2, and the plan made from it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Literal

import highspy

from lightning_memo.config import format_bytes
from lightning_memo.plan import Budget, Fingerprint, HostBacked, LayerCosts, Plan, Schedule, StreamedBytes, SwapPlan

Binding = Literal["overlap", "host", "all tokens swapped"]

_TIME_LIMIT_SECONDS: Final = 10.0
_GIB: Final = 1024**3
_MORE_HOST_MEMORY: Final = "raise host_memory or shorten the sequence"
_BytesOfAlpha = Callable[[float], int]
# HiGHS meets rows to 1e-7, so what it calls the best alpha can be this far from it.
_TOLERANCE: Final = 1e-6


class HostMemoryError(ValueError):
    """The host can't hold what has to be swapped."""

    def __init__(self, alpha: float, needed_bytes: int, available_bytes: int, remedy: str) -> None:
        super().__init__(
            f"alpha={alpha:g} swaps {format_bytes(needed_bytes)} ({needed_bytes} bytes) to the host, which has "
            f"{format_bytes(available_bytes)} ({available_bytes} bytes) for it: {remedy}"
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
        budget: only its host bytes are used.

    Raises:
        HostMemoryError: the host can't even hold layer inputs and attention outputs (alpha = 0).
        RuntimeError: HiGHS failed.
    """
    swapped = range(max(costs.calls - 2, 0))
    least_bytes = sum(costs.swapped_bytes(call, 0.0) for call in swapped)
    if least_bytes > budget.host_bytes:
        raise HostMemoryError(0.0, least_bytes, budget.host_bytes, _MORE_HOST_MEMORY)
    bandwidth = min(costs.offload_bytes_per_second, costs.prefetch_bytes_per_second)
    rows = [
        (costs.other_bytes[call], costs.forward_seconds[call] * bandwidth - costs.swapped_bytes(call, 0.0))
        for call in swapped
    ]
    if any(room < 0 for _, room in rows):
        return AlphaSolution(alpha=0.0, binding="overlap", hidden=False)
    rows.append((sum(other for other, _ in rows), budget.host_bytes - least_bytes))
    alpha, tight = _maximise(rows)
    if alpha >= 1.0 - _TOLERANCE:
        return AlphaSolution(alpha=1.0, binding="all tokens swapped", hidden=True)
    return AlphaSolution(alpha=alpha, binding="host" if tight == len(rows) - 1 else "overlap", hidden=True)


def _maximise(rows: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Maximise alpha in [0, 1] with `other_bytes * alpha <= room_bytes` for each row.

    Returns:
        Alpha, and the index of the row that limits it most.
    """
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    _accept(solver.setOptionValue("output_flag", False))
    _accept(solver.setOptionValue("time_limit", _TIME_LIMIT_SECONDS))
    _accept(solver.addVar(0.0, 1.0))
    _accept(solver.changeColCost(0, 1.0))
    _accept(solver.changeObjectiveSense(highspy.ObjSense.kMaximize))
    for other_bytes, room_bytes in rows:
        # HiGHS drops coefficients below 1e-9 and meets rows to 1e-7, so rows are in GiB, or finer for small models.
        scale = min(float(_GIB), max(other_bytes, 1.0))
        _accept(solver.addRow(-highspy.kHighsInf, room_bytes / scale, 1, [0], [other_bytes / scale]))
    _accept(solver.run())
    status = solver.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS did not solve for alpha: {solver.modelStatusToString(status)}")
    solution = solver.getSolution()
    prices = [abs(price) for price in solution.row_dual]
    return min(max(float(solution.col_value[0]), 0.0), 1.0), max(range(len(rows)), key=prices.__getitem__)


def _accept(status: Any) -> None:
    # HiGHS reports a refused call, an unknown option included, only by its status.
    if status == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS refused a call while solving for alpha")


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
    and fits the host; the host limit is kept to the byte. A given alpha is taken if it fits the host.

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
        host_backed: see :class:`~lightning_memo.plan.SwapPlan`.
        streamed_bytes: exact bytes for an alpha, where `host_backed` is not "none"; `slot_bytes` is not asked then.

    Raises:
        HostMemoryError: the host can't hold what has to be swapped.
        ValueError: a given alpha that the layers don't support.
    """
    steady = _steady(costs)
    swapped_calls = max(costs.calls - 2, 0)

    def host_bytes(fraction: float) -> int:
        if streamed_bytes is not None:
            return streamed_bytes(fraction).host
        return swapped_calls * slot_bytes(fraction) if swapped_calls else 0

    plain_bytes = costs.fixed_device_bytes + costs.working_bytes(0.0) + costs.skeletal_bytes
    mode: Literal["memo", "plain"] = "memo"
    if alpha != "auto":
        chosen, reason = _given_alpha(steady, budget, float(alpha), host_bytes, allowed)
    elif may_be_plain and plain_bytes <= budget.device_bytes:
        mode, chosen, reason = "plain", 0.0, _plain_reason(plain_bytes, budget)
    else:
        chosen, reason = _best_alpha(steady, budget, host_bytes, allowed)
    swap = SwapPlan(
        mode=mode,
        alpha=chosen,
        schedule=schedule,
        slice_tokens=slice_tokens,
        calls=costs.calls,
        slot_bytes=slot_bytes(chosen) if mode == "memo" and streamed_bytes is None else 0,
    )
    if streamed_bytes is not None and mode == "memo":
        sizes = streamed_bytes(chosen)
        swap = replace(
            swap,
            host_backed=host_backed,
            slot_bytes=sizes.slot,
            streamed_host_bytes=sizes.host,
            gradient_host_bytes=sizes.gradients,
            staging_bytes=sizes.staging,
        )
    return Plan(
        fingerprint=fingerprint,
        costs=costs,
        budget=budget,
        swap=swap,
        step_seconds=_step_seconds(steady, swap),
        reason=reason,
    )


def _plain_reason(plain_bytes: int, budget: Budget) -> str:
    return (
        f"Device memory is ample: plain training needs {format_bytes(plain_bytes)} of "
        f"{format_bytes(budget.device_bytes)}, so nothing is swapped or recomputed."
    )


def _steady(costs: LayerCosts) -> LayerCosts:
    """Replace the times of each layer call by the median over the calls that have the same sizes.

    A first step is cold: kernels are chosen, caches filled, pages touched, and that falls on single calls, the first
    above all. Layers of one size do the same work, so their median is what each takes once warm, and the LP, which
    the worst layer decides, is not ruled by one cold call.
    """
    sizes = list(zip(costs.input_bytes, costs.attention_bytes, costs.other_bytes, strict=True))

    def medians(seconds: tuple[float, ...]) -> tuple[float, ...]:
        alike: dict[tuple[int, int, int], list[float]] = {}
        for size, value in zip(sizes, seconds, strict=True):
            alike.setdefault(size, []).append(value)
        middle = {size: median(values) for size, values in alike.items()}
        return tuple(middle[size] for size in sizes)

    return replace(
        costs,
        forward_seconds=medians(costs.forward_seconds),
        backward_seconds=medians(costs.backward_seconds),
        recompute_seconds=medians(costs.recompute_seconds),
    )


def _given_alpha(
    costs: LayerCosts, budget: Budget, alpha: float, host_bytes: _BytesOfAlpha, allowed: tuple[float, ...] | None
) -> tuple[float, str]:
    if allowed is not None and alpha not in allowed:
        raise ValueError(
            f'alpha={alpha:g} is not possible, as the layers allow only {_listed(allowed)}: give one, or "auto"'
        )
    needed_bytes = host_bytes(alpha)
    if needed_bytes > budget.host_bytes:
        raise HostMemoryError(
            alpha, needed_bytes, budget.host_bytes, 'set a smaller alpha or alpha="auto", or raise host_memory'
        )
    return alpha, f"alpha was given; {_overlap_clause(costs, alpha)}."


def _best_alpha(
    costs: LayerCosts, budget: Budget, host_bytes: _BytesOfAlpha, allowed: tuple[float, ...] | None
) -> tuple[float, str]:
    solution = solve_alpha(costs, budget)
    fitting = _fitting_alpha(costs, budget, solution.alpha, host_bytes, allowed)
    limits = {
        "overlap": f"Above alpha={solution.alpha:.4g} a layer's copy would outlast its forward",
        "host": f"Above alpha={solution.alpha:.4g} the host budget of {format_bytes(budget.host_bytes)} would overflow",
        "all tokens swapped": "The copies of all tokens hide under the forward and fit the host",
    }
    if costs.calls <= 2:
        reason = "The last two layer calls stay on the device, and there are no others"
    elif not solution.hidden:
        reason = f"Even at alpha=0 {_overlap_clause(costs, 0.0)}"
    else:
        reason = limits[solution.binding]
    if allowed is not None:
        reason += f"; the layers allow only {_listed(allowed)}"
    elif fitting < solution.alpha - 2 / costs.tokens:
        reason += f"; host slots are aligned, so alpha={fitting:.4g} is what fits"
    return fitting, reason + "."


def _fitting_alpha(
    costs: LayerCosts, budget: Budget, limit: float, host_bytes: _BytesOfAlpha, allowed: tuple[float, ...] | None
) -> float:
    """Largest fraction up to `limit` whose slots, alignment included, fit the host, in whole tokens."""

    def fits(alpha: float) -> bool:
        return host_bytes(alpha) <= budget.host_bytes

    limit = min(limit + _TOLERANCE, 1.0)
    if allowed is not None:
        possible = [alpha for alpha in sorted(allowed) if fits(alpha)]
        # The overlap limit only costs time, so the smallest fraction may pass it where the layers leave no choice.
        if possible:
            return max([alpha for alpha in possible if alpha <= limit], default=possible[0])
        least = min(allowed)
    else:
        # Slots grow with alpha, so the first count of tokens that doesn't fit is found by bisection.
        counts = range(math.floor(limit * costs.tokens) + 1)
        fitting = bisect_left(counts, True, key=lambda count: not fits(count / costs.tokens))
        if fitting:
            return (fitting - 1) / costs.tokens
        least = 0.0
    raise HostMemoryError(least, host_bytes(least), budget.host_bytes, _MORE_HOST_MEMORY)


def _overlap_clause(costs: LayerCosts, alpha: float) -> str:
    bandwidth = min(costs.offload_bytes_per_second, costs.prefetch_bytes_per_second)
    hidden = all(
        costs.swapped_bytes(call, alpha) <= costs.forward_seconds[call] * bandwidth for call in range(costs.calls - 2)
    )
    return "copies hide under the forward" if hidden else "copies outlast the forward and slow the step"


def _listed(allowed: tuple[float, ...]) -> str:
    return " or ".join(f"{alpha:g}" for alpha in sorted(allowed))


def _step_seconds(costs: LayerCosts, swap: SwapPlan) -> float:
    """Expected seconds of a step: each layer's compute or its copy, whichever takes longer (MEMO, section 4.2)."""
    seconds = costs.outside_seconds
    for call in range(costs.calls):
        # The last two calls copy nothing, but recompute like the others.
        copied_bytes = costs.swapped_bytes(call, swap.alpha) if call < swap.swapped_calls else 0
        recomputed = 0.0 if swap.mode == "plain" else (1.0 - swap.alpha) * costs.recompute_seconds[call]
        seconds += max(costs.forward_seconds[call], copied_bytes / costs.offload_bytes_per_second)
        seconds += max(costs.backward_seconds[call] + recomputed, copied_bytes / costs.prefetch_bytes_per_second)
    return seconds
