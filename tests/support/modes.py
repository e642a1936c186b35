"""Test modes that take a plan of a kind, whatever the times of others, or attention over all slices at once."""

from __future__ import annotations

from lightning_memo.engine import TestMode

BY_KIND = TestMode(longest_delay_seconds=0.0, plans="kinds")
BY_ALPHA = TestMode(longest_delay_seconds=0.0, plans="alpha")
JOINT = TestMode(longest_delay_seconds=0.0, joint_attention=True)
