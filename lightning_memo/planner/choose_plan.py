"""The choice between plain training, a place for each kind of tensor, and a single alpha."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_memo.artifacts.plan import Plan

Seconds = tuple[float, float]
"""Expected seconds of a step by kinds of tensors, and by a single alpha."""


def choose_plan(
    by_kind: Plan | None,
    by_alpha: Callable[[], Plan],
    *,
    device_measured: bool,
    slowest: Callable[[Seconds], Seconds] = lambda seconds: seconds,
) -> Plan:
    """Return the plan of `storage="auto"`: plain training if that fits, otherwise the faster of two plans.

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
    if by_kind is not None and by_kind.swap.mode == "plain":
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
    return of_alpha if alpha_seconds < kind_seconds else by_kind
