"""Planning: from measured costs and a budget to a plan. Pure, without torch or Lightning."""

from lightning_memo.planner.alpha.alpha_program import AlphaSolution, HostMemoryError, plan_swap, solve_alpha

__all__ = ["AlphaSolution", "HostMemoryError", "plan_swap", "solve_alpha"]
