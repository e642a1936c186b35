"""Plans made from measured costs and a memory budget. Imports neither torch nor Lightning."""

from lightning_memo.planner.plan_swap import AlphaSolution, HostMemoryError, plan_swap, solve_alpha

__all__ = ["AlphaSolution", "HostMemoryError", "plan_swap", "solve_alpha"]
