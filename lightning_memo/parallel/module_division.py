"""Gives all processes the same weights, and notes how they were divided."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# Attribute of a module that describes how it is divided.
_DIVISION = "_lightning_memo_division"


def share_weights(module: nn.Module, device: torch.device) -> None:
    """Broadcast the weights of rank 0.

    Args:
        module: Module of the same architecture on all processes.
        device: Device of this process.
    """
    for t in [*module.parameters(), *module.buffers()]:
        there = t.data.to(device).contiguous()
        dist.broadcast(there, src=0)
        t.data.copy_(there)


def was_divided(module: nn.Module, division: str, stage: bool) -> bool:
    """Whether an earlier fit divided a module. If it did not, `division` is noted as how it is going to be divided.

    Args:
        module: The module.
        division: How it is to be divided.
        stage: Whether it has lost the weights of other stages of a pipeline.

    Raises:
        ValueError: It was divided in another way.
    """
    if not stage and not any(isinstance(p, DTensor) for p in module.parameters()):
        setattr(module, _DIVISION, division)
        return False
    before = getattr(module, _DIVISION, division)
    if before != division:
        raise ValueError(
            f"an earlier strategy divided this module as {before}, and it cannot be divided as {division}: save a "
            "checkpoint, and load it into a new module"
        )
    return True
