"""The device of the tests, and the checks that keep tests on the emulated device honest.

With `TEST_DEVICE=cuda`, models, batches, trainers and processes of the tests use CUDA. `make test-cuda` runs tests of
the engine, the strategy and several processes in this way, on an emulated device.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
ACCELERATOR, BACKEND = ("gpu", "cpu:gloo,cuda:nccl") if DEVICE.type == "cuda" else ("cpu", "gloo")

FUSED = DEVICE.type == "cuda"
"""Whether the device has fused kernels for all that `fused_kernels` of `MemoStrategy` means."""

emulated_device: Any = None
if importlib.util.find_spec("emulated_device") is not None and torch.cuda.is_available():
    import emulated_device

needs_real_gpu = pytest.mark.skipif(emulated_device is not None, reason="needs the speed of a real GPU")


def skip_folder(items: Sequence[pytest.Item], folder: Path, reason: str) -> None:
    """Skip the collected tests of a folder."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


def skip_ring_on_cuda(settings: dict[str, Any]) -> None:
    """Skip a test in FP32 if these settings of the strategy mean ring attention, which takes half precision on CUDA."""
    context = settings.get("context_parallel_size", 1)
    ring = context > 1 and settings.get("ulysses_size", 1) != context
    if DEVICE.type == "cuda" and ring:
        pytest.skip("ring attention takes half precision on CUDA")


@contextmanager
def nothing_hidden() -> Iterator[None]:
    """Check that no unknown kernel was launched, no kernel failed, and no operator made the host wait.

    Such an operator would hide races: it makes the host and the device run in turn. Other devices have no checks.
    """
    if emulated_device is None:
        yield
        return
    unknown, inline = emulated_device.count("unknown_kernels"), emulated_device.inline_operators()
    yield
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")  # raises what a kernel raised
    assert emulated_device.count("unknown_kernels") == unknown
    assert emulated_device.inline_operators() == inline
