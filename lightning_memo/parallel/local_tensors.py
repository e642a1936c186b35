"""Local parts of distributed tensors (`DTensor`), and results of asynchronous collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local_part(t: Tensor) -> Tensor:
    """Returns the plain tensor with this rank's part of `t`, after waiting for the collective that computes it."""
    if isinstance(t, DTensor):
        t = t._local_tensor
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t


def awaited(t: Tensor) -> Tensor:
    """Returns `t` as a plain tensor after waiting for its collective; differentiable."""
    return _Await.apply(t) if isinstance(t, AsyncCollectiveTensor) else t


@dataclass(frozen=True, slots=True)
class ShardedHandle:
    """A handle of a DTensor's local part, with the metadata needed to build the DTensor again."""

    local: Any
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: DTensor, local: Any) -> ShardedHandle:
        return cls(local, t.device_mesh, t.placements, t.shape, t.stride())

    def wrap(self, local: Tensor) -> DTensor:
        """Returns the DTensor with this local part."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        plain = local_part(t)
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
