"""Norm and clipping of gradients that are sharded over different device meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_memo.parallel.local_tensors import local_part


class HasGradient(Protocol):
    """A parameter, or what stands for it.

    Attributes:
        grad: Its gradient; `None` if there is none.
    """

    grad: Tensor | None


def resolve_partial(parameters: Iterable[HasGradient]) -> None:
    """All-reduce gradients that are partial sums on each rank and that FSDP has not reduced."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            summed = [Replicate() if p.is_partial() else p for p in gradient.placements]
            parameter.grad = gradient.redistribute(placements=summed)


def total_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, holders: Callable[[nn.Parameter], int] | None = None
) -> Tensor:
    """Returns the 2-norm of all gradients, the same fp32 scalar on every rank. Uses one all-reduce.

    Args:
        parameters: Parameters of this rank: plain tensors, or DTensors on any mesh.
        device: Device on which collectives run.
        holders: Returns the number of ranks that hold a parameter or a part of it; `None` if all do.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    trained = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in trained]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack([torch.linalg.vector_norm(local_part(g), dtype=torch.float32) for g in gradients])
        # `holders / shards` ranks hold a copy of each shard.
        counts = [processes if holders is None else holders(p) for p in trained]
        parts = [_shards(g) / count for g, count in zip(gradients, counts, strict=True)]
        shares = torch.tensor(parts, dtype=torch.float64, device=device)
        total = norms.to(device).double().square() @ shares
    if processes > 1:
        dist.all_reduce(total)
    return total.sqrt().float()


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    largest: float,
    device: torch.device,
    holders: Callable[[nn.Parameter], int] | None = None,
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `largest`.

    Args:
        parameters: Parameters as for :func:`total_norm`.
        largest: Largest allowed norm.
        device: Device on which collectives run.
        holders: As for :func:`total_norm`.

    Returns:
        The norm before scaling, an fp32 scalar.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = total_norm(parameters, device, holders)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        gradient = local_part(parameter.grad)
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def clip_by_value(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """Clamp all gradients in place to `[-largest, largest]`."""
    parameters = [p for p in parameters if p.grad is not None]
    for parameter in parameters:
        local_part(parameter.grad).clamp_(-largest, largest)


def _shards(gradient: Tensor) -> int:
    """Returns the number of shards that a gradient is divided into."""
    if not isinstance(gradient, DTensor):
        return 1
    shards = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        if not placement.is_replicate():
            shards *= size
    return shards
