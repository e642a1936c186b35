"""One alpha for all ranks: the smallest that any of them can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_memo.artifacts.plan import Plan
from lightning_memo.parallel.ranks import Ranks


def agree_on_plan(solve: Callable[[float | None, bool], Plan], ranks: Ranks, everyone: bool) -> Plan:
    """Returns this rank's plan with the alpha that all ranks use: the smallest alpha of any rank's own plan.

    Args:
        solve: Computes this rank's plan from an alpha (`None` for the user's setting) and from whether the plan may be
            plain training.
        ranks: Ranks of the run.
        everyone: Agree among all ranks; otherwise among the ranks that compute the same sequences.

    Raises:
        ValueError: A rank has no feasible plan.
    """
    plan = ranks.run_alike(lambda: solve(None, True), everyone)
    if len(set(ranks.gather_slicing(plan.swap.mode, everyone))) > 1:
        plan = ranks.run_alike(lambda: solve(None, False), everyone)
    smallest = min(ranks.gather_slicing(plan.swap.alpha, everyone))
    if plan.swap.alpha == smallest:
        return plan
    least = f"another process runs no more than alpha={smallest:.4g}, and all take the smallest"
    return replace(solve(smallest, False), reason=f"By itself alpha={plan.swap.alpha:.4g}, but {least}.")
