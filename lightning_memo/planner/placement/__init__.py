"""Assigns offsets to buffers with known lifetimes so that the peak is low, with a proof of optimality if possible."""

from lightning_memo.planner.placement.problem import Placement, Problem
from lightning_memo.planner.placement.solve import Progress, place
from lightning_memo.planner.placement.validate import Finding, PlacementFault, validate

__all__ = ["Finding", "Placement", "PlacementFault", "Problem", "Progress", "place", "validate"]
