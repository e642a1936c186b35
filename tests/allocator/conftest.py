"""The planned allocator of the CPU as a fixture."""

from __future__ import annotations

import pytest
import torch

from lightning_memo.allocator import PlannedAllocator


@pytest.fixture
def allocator():
    """An installed allocator, which is uninstalled after the test even if it fails."""
    planned = PlannedAllocator(torch.device("cpu"))
    planned.install()
    planned.reset_stats()
    yield planned
    planned.leave()
    planned.release()
    planned.take_events()
    planned.uninstall()
    stats = planned.stats()
    assert stats.live_blocks == 0 and stats.arena_bytes == 0 and stats.bad_frees == 0
