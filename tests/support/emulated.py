"""The emulated device's module, in the environment of `make test-cuda`, and the checks that keep tests there honest."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

emulated_device: Any = None
if importlib.util.find_spec("emulated_device") is not None and torch.cuda.is_available():
    import emulated_device


@contextmanager
def nothing_hidden() -> Iterator[None]:
    """Check that no unknown kernel was launched, no kernel failed, and no operator made the host wait.

    Such an operator would hide races: it makes the host and the device run in turn.
    """
    unknown, inline = emulated_device.count("unknown_kernels"), emulated_device.inline_operators()
    yield
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")  # raises what a kernel raised
    assert emulated_device.count("unknown_kernels") == unknown
    assert emulated_device.inline_operators() == inline
