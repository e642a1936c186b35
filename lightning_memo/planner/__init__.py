"""Plans made from measured costs and a memory budget. Imports neither torch nor Lightning."""

from lightning_memo.planner.largest_alpha import AlphaSolution, HostMemoryError, solve_alpha
from lightning_memo.planner.plan_swap import plan_swap

__all__ = ["AlphaSolution", "HostMemoryError", "plan_swap", "solve_alpha"]
