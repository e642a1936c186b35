"""Autocast's copies of weights, which a graph would hold from the forward to the backward: 2 bytes for each weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

_COPY: Final = "ToCopyBackward0"
_VIEWS: Final = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"}


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """Stands for a view of a weight's copy in another dtype."""

    weight: nn.Parameter
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: Tensor) -> WeightCopy | None:
        """What makes `t` again from its weight; `None`: it is no plain copy of all of one."""
        weight = _copied_weight(t.grad_fn)
        if weight is None or t.untyped_storage().nbytes() != weight.numel() * t.element_size():
            return None
        return cls(weight, weight._version, t.dtype, t.shape, t.stride(), t.storage_offset())


class WeightCopies:
    """Copies that the backward of a layer call makes again, each once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}

    def restore(self, copy: WeightCopy) -> Tensor:
        """The tensor that a handle stands for.

        Raises:
            RuntimeError: The weight was changed since.
        """
        if copy.weight._version != copy.version:
            raise RuntimeError(
                "a weight that the backward needs was changed in place after the forward: step the optimizer, or load "
                "weights, before the forward or after the backward"
            )
        key = id(copy.weight), copy.dtype
        if key not in self._made:
            self._made[key] = copy.weight.detach().to(copy.dtype)
        return torch.as_strided(self._made[key], copy.shape, copy.stride, copy.offset)

    def clear(self) -> None:
        """The backward is over."""
        self._made.clear()


def _copied_weight(node: Node | None) -> nn.Parameter | None:
    """The weight of which a copy, or views of one, have this history."""
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != _COPY:
        return None
    weight = getattr(node.next_functions[0][0], "variable", None)
    # A parameter of another type (a DTensor, a quantised one) knows better how it is copied.
    return weight if type(weight) is nn.Parameter and type(weight.data) is Tensor else None
