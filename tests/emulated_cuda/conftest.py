"""Tests of and on the emulated device; without it they are skipped. `make test-cuda` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.devices import emulated_device, skip_folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if emulated_device is None:
        skip_folder(items, Path(__file__).parent, "needs the emulated device: run `make test-cuda`")


@pytest.fixture(autouse=True)
def on_time() -> Iterator[None]:
    """Set no delays behind a test that sets some."""
    yield
    if emulated_device is not None:
        emulated_device.set_delays()
        torch.cuda.synchronize()
