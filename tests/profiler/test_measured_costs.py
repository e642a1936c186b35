"""Costs of layer calls that are measured in a profiled step."""

from __future__ import annotations

from unittest.mock import Mock

from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.profiler.measured_costs import recompute_seconds


def test_a_recomputation_takes_no_longer_than_the_forward_without_attention() -> None:
    """The second call waited for the host, the third one computed attention again, and the last one has none."""
    measured = {
        "recompute": (11.0, 16.0, 26.0, 5.0),
        "attention_again": (0.0, 0.0, 15.0, 0.0),
        "forward": (27.0, 27.0, 27.0, 6.0),
        "attention": (15.0, 15.0, 15.0, 0.0),
    }
    profile = Mock(spec=StepProfile, seconds_of=measured.__getitem__)
    assert recompute_seconds(profile) == (11.0, 12.0, 11.0, 5.0)
