"""Asynchronous copies of small tensors from the host to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device_async(t: Tensor, device: torch.device) -> Tensor:
    """Copy `t` to the device without making the host wait for the device's pending work.

    A copy from pageable memory would wait for the stream, and so would one from memory with gaps, of which PyTorch
    makes a pageable copy first. PyTorch keeps page-locked memory until its copies have ended.
    """
    if device.type != "cuda" or t.device.type != "cpu":
        return t.to(device)
    return t.contiguous().pin_memory().to(device, non_blocking=True)
