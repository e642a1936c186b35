"""Measures how fast a device compresses activations and restores them (`swap_precision="fp8"`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from lightning_memo.artifacts.compressed_layout import compressed_bytes
from lightning_memo.engine.memory.compressed_values import CompressedValues

_VALUES: Final = {"cuda": 2**24, "cpu": 2**19}  # enough for a GPU to outweigh the launches of kernels
_LEAST_VALUES: Final = 2**16
_RUNS: Final = 3


def compression_speed(device: torch.device) -> tuple[float, float]:
    """Return the bytes of bf16 that a device compresses per second, and that it restores.

    The kernels read and write memory, and do little else: the bytes of other types take about as long.

    Args:
        device: The device.
    """
    values, memory = _some_values(_VALUES[device.type], device)
    compressed = CompressedValues(memory, len(values), values.dtype)
    compress, restore = (_seconds(run, device) for run in (lambda: compressed.write(values), compressed.read))
    return values.nbytes / compress, values.nbytes / restore


def _some_values(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return values, and memory for them compressed: the step may have left little of the device."""
    try:
        values = torch.ones(count, dtype=torch.bfloat16, device=device)
        return values, torch.empty(compressed_bytes(count, values.itemsize), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        if count <= _LEAST_VALUES:
            raise
    return _some_values(count // 4, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest duration of some runs, the first of which warms up."""
    times = []
    for _ in range(_RUNS + 1):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
