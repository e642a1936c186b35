"""Gathers the weights of all stages of a pipeline on the first process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_memo.parallel.run_on_ranks import gather
from lightning_memo.utils.find_layers import find_hugging_face

STAGE = "_lightning_memo_stage"
"""Attribute of a model that has lost the weights of other stages: the state of its forward."""


def is_stage(module: nn.Module) -> bool:
    """Return whether a module has lost the weights of other stages of a pipeline."""
    return any(hasattr(model, STAGE) for model in find_hugging_face(module))


def gather_stages(module: nn.Module) -> dict[str, Any] | None:
    """Gather the state of all stages in the host memory of the first process, one tensor at a time.

    Args:
        module: A module that is divided over stages. All processes call this.

    Returns:
        Full tensors by name on the first process; `None` on the others.
    """
    state = {name: value for name, value in get_model_state_dict(module).items() if isinstance(value, Tensor)}
    everyones = gather({name: (value.shape, value.dtype) for name, value in state.items()})
    owners: dict[str, int] = {}  # the first process that has a tensor
    for rank, shapes in enumerate(everyones):
        for name in shapes:
            owners.setdefault(name, rank)
    own = dist.get_rank()
    whole: dict[str, Tensor] = {}
    for name, value in state.items():
        full = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        if owners[name] == own == 0:
            whole[name] = full.cpu()
        elif owners[name] == own:
            dist.send(full.contiguous(), dst=0)
    if own > 0:
        return None
    device = next(module.parameters()).device
    for name, owner in owners.items():
        if owner > 0:
            shape, dtype = everyones[owner][name]
            there = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(there, src=owner)
            whole[name] = there.cpu()
    return whole
