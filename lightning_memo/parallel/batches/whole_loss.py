"""Gives the loss of a process the value of the loss of all processes.

A process computes the loss of its own labels, and gradients are averaged over the processes. A function of the loss,
such as its square, has the right gradient only where it is taken at the loss of all labels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def with_whole_loss(output: Any, group: dist.ProcessGroup) -> Any:
    """Return the output of a Hugging Face model whose loss has the value of the mean over processes.

    Its gradient stays that of this process's loss.

    Args:
        output: Output with a `loss`, a tuple that begins with it, or the loss.
        group: The processes that share the loss; all of them call this, except for a loss without a gradient, which
            stays that of this process.
    """
    if isinstance(output, tuple):
        return _mean(output[0], group), *output[1:]
    if isinstance(output, Tensor):
        return _mean(output, group)
    if isinstance(getattr(output, "loss", None), Tensor):
        output.loss = _mean(output.loss, group)
    return output


def _mean(loss: Any, group: dist.ProcessGroup) -> Any:
    # A forward without gradients may run on one process only, to log something, for example.
    is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad
    return _MeanOverProcesses.apply(loss, group) if is_loss else loss


class _MeanOverProcesses(torch.autograd.Function):
    """The mean of a number over processes, with the gradient of a process's own number."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = loss.to(torch.promote_types(loss.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=group)
        return (total / dist.get_world_size(group)).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
