"""Small tensors of the host on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(t: Tensor, device: torch.device) -> Tensor:
    """`t` on the device, without the host waiting for what the device does before.

    A copy from pageable memory would wait for the stream; PyTorch keeps page-locked memory until its copies have ended.
    """
    if device.type != "cuda" or t.device.type != "cpu":
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)
