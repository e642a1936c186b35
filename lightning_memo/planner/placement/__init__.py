"""Assigns offsets to buffers with known lifetimes so that the peak is low, with a proof of optimality if possible."""

from lightning_memo.planner.placement.problem import Finding, Placement, PlacementFault, Problem, validate
from lightning_memo.planner.placement.solve import Progress, place

__all__ = ["Finding", "Placement", "PlacementFault", "Problem", "Progress", "place", "validate"]
