"""Offsets for buffers with lifetimes: as low a peak as can be found, and a proof where there is one."""

from lightning_memo.planner.placement.problem import Placement, Problem
from lightning_memo.planner.placement.solve import Progress, place
from lightning_memo.planner.placement.validate import Finding, PlacementFault, validate

__all__ = ["Finding", "Placement", "PlacementFault", "Problem", "Progress", "place", "validate"]
