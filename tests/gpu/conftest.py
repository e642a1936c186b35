"""Tests that need a GPU; without one they are skipped with a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_memo.kernels.select_kernel import check_available

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and PyTorch sees none"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["sdpa", "cudnn", "flash_attn", "transformer_engine"])
def choice(request) -> str:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    try:
        check_available(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param
