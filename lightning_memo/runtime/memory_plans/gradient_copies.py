"""Takes gradients out of planned memory."""

from __future__ import annotations

from torch import nn


def copy_gradients(model: nn.Module) -> None:
    """Replace each gradient by a copy, which is in PyTorch's memory while the allocator is idle."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
