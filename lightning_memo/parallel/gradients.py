"""Norm and clipping of gradients that live on different meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_memo.parallel.local_tensors import local_part


def resolve_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients of which every process has a share, where FSDP has not done so."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            summed = [Replicate() if p.is_partial() else p for p in gradient.placements]
            parameter.grad = gradient.redistribute(placements=summed)


def total_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """The 2-norm of all gradients, the same scalar on every process, by one all-reduce.

    Args:
        parameters: The same ones on every process, whole, sharded or replicated on any mesh.
        device: Where collectives run.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack([torch.linalg.vector_norm(local_part(g), dtype=torch.float32) for g in gradients])
        # Each shard is there `processes / shards` times.
        shares = torch.tensor([_shards(g) / processes for g in gradients], dtype=torch.float64, device=device)
        total = norms.to(device).double().square() @ shares
    if processes > 1:
        dist.all_reduce(total)
    return total.sqrt().float()


def clip_by_norm(parameters: Iterable[nn.Parameter], largest: float, device: torch.device) -> Tensor:
    """Scale all gradients so that their norm is at most `largest`; returns the norm before."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = total_norm(parameters, device)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        gradient = local_part(parameter.grad)
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def clip_by_value(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """Clamp all gradients to `[-largest, largest]`."""
    parameters = [p for p in parameters if p.grad is not None]
    for parameter in parameters:
        local_part(parameter.grad).clamp_(-largest, largest)


def _shards(gradient: Tensor) -> int:
    """In how many parts a gradient is cut."""
    if not isinstance(gradient, DTensor):
        return 1
    shards = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        if not placement.is_replicate():
            shards *= size
    return shards
