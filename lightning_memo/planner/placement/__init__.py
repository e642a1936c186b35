"""Offsets for buffers with lifetimes: as low a peak as can be found, and a proof where there is one."""

from lightning_memo.planner.placement.problem import Placement, Problem
from lightning_memo.planner.placement.solve import Progress, place
from lightning_memo.planner.placement.validate import Fault, Finding, validate

__all__ = ["Fault", "Finding", "Placement", "Problem", "Progress", "place", "validate"]
