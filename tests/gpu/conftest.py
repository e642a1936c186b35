"""Tests that need a GPU; without one they are skipped with a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
