"""Tests that need a GPU; without one they are skipped with a message."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.devices import skip_folder

from lightning_memo.allocator import PlannedAllocator
from lightning_memo.kernels.select_kernel import check_available


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip_folder(items, Path(__file__).parent, "needs a CUDA device, and PyTorch sees none")


@pytest.fixture(params=["sdpa", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4", "transformer_engine"])
def choice(request) -> str:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    try:
        check_available(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def allocator(device: torch.device) -> Iterator[PlannedAllocator]:
    """An installed allocator, which is uninstalled after the test even if it fails."""
    torch.ones(1, device=device)  # PyTorch's allocator is in use already, as in training
    torch.cuda.empty_cache()  # blocks of other tests might be given, with a little more than was asked for
    planned = PlannedAllocator(device)
    planned.install()
    planned.reset_stats()
    yield planned
    gc.collect()  # of a test that failed
    planned.leave()
    planned.release()
    planned.take_events()
    planned.uninstall()
    stats = planned.stats()
    assert (stats.live_blocks, stats.arena_bytes, stats.bad_frees) == (0, 0, 0)
