"""Tensors made of other tensors, as quantised ones are of integers and scales: they are stored part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memo.parallel.local_tensors import local_part


def is_wrapped(t: Tensor) -> bool:
    """Whether a tensor can be taken apart, by PyTorch's protocol `__tensor_flatten__`."""
    return type(t) not in (Tensor, nn.Parameter) and is_traceable_wrapper_subclass(t)


def is_opaque(t: Tensor) -> bool:
    """Whether nothing is known of what a tensor is made of: its bytes would not make it again."""
    return type(t) not in (Tensor, nn.Parameter) and not is_traceable_wrapper_subclass(t)


def plain_parts(t: Tensor) -> list[Tensor]:
    """The plain tensors that hold this process's bytes of `t`."""
    t = local_part(t)
    if not is_wrapped(t):
        return [t]
    return [part for name in t.__tensor_flatten__()[0] for part in plain_parts(getattr(t, name))]


@dataclass(frozen=True, slots=True)
class WrappedHandle:
    """Handles of a tensor's parts, and what else makes it what it is."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor, store: Callable[[Tensor], Any]) -> WrappedHandle:
        """Store the parts of a tensor, each by `store`."""
        names, context = t.__tensor_flatten__()
        return cls(type(t), {name: store(getattr(t, name)) for name in names}, context, t.shape, t.stride())

    def wrap(self, load: Callable[[Any], Tensor]) -> Tensor:
        """The tensor, made of its parts again."""
        parts = {name: load(handle) for name, handle in self.parts.items()}
        made: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.shape, self.stride)
        return made
