"""Plans made from measured costs and a memory budget. Imports neither torch nor Lightning."""

from lightning_memo.planner.make_plan import HostMemoryError, Restrictions, make_plan

__all__ = ["HostMemoryError", "Restrictions", "make_plan"]
