"""The measurements of a profiled step from which its plan is made."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint
from lightning_memo.engine.layers.step_profile import StepProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A profiled step, its costs, and the memory that a plan for such steps may use."""

    profile: StepProfile
    costs: LayerCosts
    budget: Budget
    label: Fingerprint
    """What a plan that is made from the step is valid for."""
