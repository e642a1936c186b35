"""Tensors that are made of other tensors, as quantized ones are of integers and scales. They are stored by parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memo.parallel.local_tensors import local_part


def is_wrapped(t: Tensor) -> bool:
    """Return whether a tensor can be taken apart by PyTorch's protocol `__tensor_flatten__`."""
    return type(t) not in (Tensor, nn.Parameter) and is_traceable_wrapper_subclass(t)


def is_opaque(t: Tensor) -> bool:
    """Return whether the parts of a tensor are unknown, so that it cannot be made again from bytes."""
    return type(t) not in (Tensor, nn.Parameter) and not is_traceable_wrapper_subclass(t)


def is_sparse(t: Tensor) -> bool:
    """Return whether a tensor has no storage, but indices and values."""
    return t.layout not in (torch.strided, torch.jagged)


def plain_parts(t: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold this process's bytes of `t`; of a sparse tensor, the values only."""
    t = local_part(t)
    if is_sparse(t):
        return [t.detach()._values() if t.is_sparse else t.detach().values()]
    if not is_wrapped(t):
        return [t]
    return [part for name in t.__tensor_flatten__()[0] for part in plain_parts(getattr(t, name))]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and dtype, and hold the same. NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    pairs = zip(plain_parts(a), plain_parts(b), strict=True)
    return all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def put_back(t: Tensor, value: Tensor) -> None:
    """Give a tensor the shape and the values of a copy, so that a graph that has saved the tensor sees no change."""
    if (t.shape, t.dtype, t.device) != (value.shape, value.dtype, value.device):
        t.data = value.clone()
    elif not same_bytes(t, value):
        t.data.copy_(value)


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().flatten().view(torch.uint8)


@dataclass(frozen=True, slots=True)
class WrappedHandle:
    """The handles of a tensor's parts, and what else is needed to make the tensor of them."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor, store: Callable[[Tensor], Any]) -> WrappedHandle:
        """Store each part of a tensor by `store`, and return the handle of the tensor."""
        names, context = t.__tensor_flatten__()
        return cls(type(t), {name: store(getattr(t, name)) for name in names}, context, t.shape, t.stride())

    def wrap(self, load: Callable[[Any], Tensor]) -> Tensor:
        """Return the tensor, made of its parts, each of which `load` returns."""
        parts = {name: load(handle) for name, handle in self.parts.items()}
        made: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.shape, self.stride)
        return made
