"""Autocast's copies of weights. A graph would hold them, 2 bytes per weight, from the forward to the backward.

Note: [Copies of frozen weights]
The copy of a trained weight has a history that shows of which weight it was made. The copy of a frozen weight has no
history, and could be taken for an activation. It is therefore made here, just before autocast would make it, and noted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_memo.engine.forward.intercept import OwnMode
from lightning_memo.engine.forward.matrix_products import WEIGHT_PLACES
from lightning_memo.engine.memory.saved_storages import Registry
from lightning_memo.engine.saved_tensors.side_effects import address_of
from lightning_memo.parallel.local_tensors import local_part

_COPY: Final = "ToCopyBackward0"
_VIEWS: Final = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"}


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """Stands for a view of a weight's copy in another dtype.

    Attributes:
        weight: The weight.
        version: The version of the weight when the copy was made.
        address: The address of its storage at that time, which `weight.data = ...` changes.
        dtype: The dtype of the copy.
        shape: Shape of the view.
        stride: Strides of the view.
        offset: Offset in the copy, in elements.
    """

    weight: nn.Parameter
    version: int
    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: Tensor, weight: nn.Parameter | None) -> WeightCopy | None:
        """Return what makes `t` again from its weight; `None` if `t` is no plain copy of a whole weight."""
        if weight is None or t.untyped_storage().nbytes() != weight.numel() * t.element_size():
            return None
        return cls(
            weight, weight._version, address_of(local_part(weight)), t.dtype, t.shape, t.stride(), t.storage_offset()
        )


class WeightCopies:
    """Copies that the forward of a layer call makes, and that its backward makes again once.

    Args:
        autocast: Whether autocast is on around the layer. If not, copies are the layer's own.
    """

    def __init__(self, autocast: bool) -> None:
        self._autocast = autocast
        self._frozen: Registry[nn.Parameter] = Registry()
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}

    def of_frozen(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return a copy of a frozen weight in another dtype, which `find_frozen` recognizes."""
        copy = weight.detach().to(dtype)
        self._frozen.add(copy, weight)
        return copy

    def find_frozen(self, t: Tensor) -> WeightCopy | None:
        """Return what makes `t` again if `of_frozen` made it; `None` otherwise."""
        known = self._frozen.find(t) if type(t) is Tensor and t.numel() else None
        return None if known is None else WeightCopy.of(t, known[0])

    def find_trained(self, t: Tensor) -> WeightCopy | None:
        """Return what makes `t` again if it is autocast's copy of a trained weight; `None` otherwise.

        A user's own copy may have been changed, by `copy.data.mul_` without a trace.
        """
        if t._version or not self._autocast:
            return None
        return WeightCopy.of(t, _copied_weight(t.grad_fn))

    def restore(self, copy: WeightCopy) -> Tensor:
        """Return the tensor that a handle stands for.

        Raises:
            RuntimeError: The weight was changed after the forward.
        """
        if copy.weight._version != copy.version or address_of(local_part(copy.weight)) != copy.address:
            raise RuntimeError(
                "a weight that the backward needs was changed after the forward: step the optimizer, or load "
                "weights, before the forward or after the backward"
            )
        key = id(copy.weight), copy.dtype
        if key not in self._made:
            self._made[key] = copy.weight.detach().to(copy.dtype)
        return torch.as_strided(self._made[key], copy.shape, copy.stride, copy.offset)

    def clear(self) -> None:
        """Free all copies at the end of the backward."""
        self._frozen.clear()
        self._made.clear()


class FrozenCasts(OwnMode):
    """Casts frozen weights before autocast does; see Note: [Copies of frozen weights]."""

    def __init__(self, copies: WeightCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = WEIGHT_PLACES.get(func)
        if place is not None and len(args) > place and not self.inside and _is_cast(args[place]):
            weight = args[place]
            copy = self._copies.of_frozen(weight, torch.get_autocast_dtype(weight.device.type))
            args = (*args[:place], copy, *args[place + 1 :])
        return func(*args, **(kwargs or {}))


def _is_cast(t: Any) -> bool:
    """Return whether `t` is a frozen weight that autocast is going to copy."""
    if not _is_plain(t) or t.requires_grad or not torch.is_autocast_enabled(t.device.type):
        return False
    return t.is_floating_point() and t.dtype not in (torch.float64, torch.get_autocast_dtype(t.device.type))


def _copied_weight(node: Node | None) -> nn.Parameter | None:
    """Return the weight of whose copy a tensor with this history is a view; `None` if there is none."""
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != _COPY:
        return None
    weight = getattr(node.next_functions[0][0], "variable", None)
    return weight if _is_plain(weight) else None


def _is_plain(t: Any) -> bool:
    """Return whether `t` is a plain parameter. Other types (DTensors, quantized weights) define their own copies."""
    return type(t) is nn.Parameter and type(t.data) is Tensor
