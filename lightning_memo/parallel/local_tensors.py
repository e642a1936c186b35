"""Distributed tensors (`DTensor`): local parts, results of asynchronous collectives, and errors of mixed tensors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

_OF_PARTS = (
    "the training step adds weights of which each process has a part (DTensor) to whole tensors: add "
    "full_tensor() of their sums, such as p.pow(2).sum().full_tensor()"
)
_IN_BACKWARD = ("got mixed torch.Tensor and DTensor", "only accepts torch.Tensor but got")


def local_part(t: Tensor) -> Tensor:
    """Returns the plain tensor with this rank's part of `t`, after waiting for the collective that computes it."""
    if isinstance(t, DTensor):
        t = t._local_tensor
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t


def awaited(t: Tensor) -> Tensor:
    """Returns `t` as a plain tensor after waiting for its collective; differentiable."""
    return _Await.apply(t) if isinstance(t, AsyncCollectiveTensor) else t


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        plain = local_part(t)
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


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


class _HasGradient(Protocol):
    """A parameter, or what stands for it.

    Attributes:
        grad: Its gradient; `None` if there is none.
    """

    grad: Tensor | None


def resolve_partial(parameters: Iterable[_HasGradient]) -> None:
    """All-reduce gradients that are partial sums on each rank and that FSDP has not reduced."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            summed = [Replicate() if p.is_partial() else p for p in gradient.placements]
            parameter.grad = gradient.redistribute(placements=summed)


@contextlib.contextmanager
def explaining_divided_gradients() -> Iterator[None]:
    """Inside a backward, PyTorch's errors about a divided gradient of a whole tensor become one line.

    Raises:
        ValueError: A loss was computed from divided tensors and from whole ones.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _IN_BACKWARD):
            raise
        raise ValueError(_OF_PARTS) from error


@contextlib.contextmanager
def explaining_mixed_tensors(tensor_parallel: bool, sequence_parallel: bool) -> Iterator[None]:
    """Inside, PyTorch's errors about divided and whole tensors in one operation become one line.

    Args:
        tensor_parallel: Whether processes share weights for computing, rather than FSDP2 for keeping them.
        sequence_parallel: Whether each process has some of the tokens between blocks.

    Raises:
        ValueError: An operation got a divided weight, or some of the tokens, and a tensor that is not divided.
    """
    try:
        yield
    except RuntimeError as error:
        if sequence_parallel and "must match the size of tensor" in str(error):
            raise ValueError(
                "sequence_parallel=True: the model combines some of the tokens with all of them outside of attention "
                f"and MLP modules ({error}): set sequence_parallel=False"
            ) from error
        if "on inputs with different meshes" in str(error):
            raise ValueError(_OF_PARTS) from error
        found = re.search(r"(aten\.\w+)\S* got mixed torch\.Tensor and DTensor", str(error))
        if found is None:
            raise
        if not tensor_parallel:
            raise ValueError(
                f"a weight that FSDP2 had divided among the processes reached {found[1]}: a backward inside of the "
                "model's forward (torch.autograd.grad) ends its use of the weights; train this model in one process"
            ) from error
        raise ValueError(
            f"tensor_parallel_size: the model passes a divided weight to {found[1]} outside of the module that holds "
            f"it: leave this weight out of tensor_parallel_plan, or train with tensor_parallel_size=1"
        ) from error
