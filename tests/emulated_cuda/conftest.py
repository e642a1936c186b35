"""Tests of and on the emulated device; without it they are skipped. `make test-cuda` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.devices import emulated_device

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if emulated_device is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs the emulated device: run `make test-cuda`"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def on_time() -> Iterator[None]:
    """Set no delays behind a test that sets some."""
    yield
    if emulated_device is not None:
        emulated_device.set_delays()
        torch.cuda.synchronize()
