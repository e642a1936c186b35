"""Host memory that is locked before a plan is made, and what a user is told of the rest."""

from __future__ import annotations

import pytest
import torch

from lightning_memo.artifacts.swap_plan import PlanMemory, SwapPlan
from lightning_memo.engine.bootstrap_plan import bytes_ahead
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.planner.token_slices import plan_of_alpha
from lightning_memo.runtime.announce_plan import announce_locking

GIB = 2**30


@pytest.mark.parametrize(
    ("free_gib", "most_gib", "locked_gib"), [(0, 100, 60), (24, 100, 36), (24, 30, 30), (61, 100, 0)]
)
def test_what_the_device_has_no_room_for_is_locked_within_the_limit(
    free_gib: int, most_gib: int, locked_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    swap = SwapPlan(storage=plan_of_alpha(64, 0.0, 32), memory=PlanMemory())  # of 32 calls, two stay on the device
    traits = LayerTraits("", saved_bytes=GIB // 2, tokens=16)
    assert bytes_ahead(swap, traits, torch.device("cuda"), most_gib * GIB) == locked_gib * GIB
    assert bytes_ahead(swap, traits, torch.device("cpu"), most_gib * GIB) == 0
    four = min(4 * 64 - free_gib, most_gib)  # none of their calls stays on the device
    assert bytes_ahead(swap, traits, torch.device("cuda"), most_gib * GIB, 4) == four * GIB


@pytest.mark.parametrize(("batches", "said"), [(1, "the next batch is swapped"), (3, "the next 3 batches are swapped")])
def test_users_are_told_of_slower_batches(batches: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        announce_locking(100 * GIB, 60 * GIB, batches)
    assert f"{said} to 60.0 GiB of host memory only, and slower, while 100.0 GiB are locked" in caplog.text
