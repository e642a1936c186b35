"""Decides which of the tensors that autograd saves are compressed in a slot (`swap_precision="fp8"`).

Note: [What stays exact]
A tensor is compressed if a function saves it whose backward reads it as a factor, or as the input of an activation
function, so that an error of a value is an error of at most the same size, relatively, in a product or a slope: matrix
products, products, squares and cubes, root mean square norms, SiLU, GELU and ReLU. All other functions save exact
tensors: a backward that subtracts a mean, subtracts from 1 (as those of tanh and the sigmoid), compares values, divides
by them, or computes an exponential again would turn small errors into large ones or into NaN, and what a function of a
user computes is not known. Exact are also

- inputs of layers, outputs of attention and of stored matrix products, and states of recurrences: recomputations start
  from them, and their results would differ from those of the forward;
- queries, keys and values: the backward of a flash kernel computes exp(query key - log-sum-exp) again, and with
  `host_backed`, attention reads keys and values from the host as they are;
- the log-sum-exp, and all other tensors that have few values for each token, such as statistics of norms: they have few
  bytes, and one of them scales a whole row;
- factors that need no gradient, such as masks of dropout, whose values are alike, so that errors would not cancel;
- integers and random states, parts of tensors that are made of other tensors, and functions of weights;
- all tensors of layers that run as one slice because they are not proven to keep tokens apart outside of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.artifacts.slot_layouts import compressed_bytes
from lightning_memo.engine.forward.intercept import OwnMode
from lightning_memo.engine.forward.matrix_products import WEIGHT_PLACES
from lightning_memo.parallel.local_tensors import local_part

LEAST_SHARE: Final = 4
"""A tensor with less than one value for so many features of the layer's input has few values for each token."""

_SMALL_POWERS: Final = (2, 3)


def _of_tensor(*names: str) -> set[Callable[..., Any]]:
    """The functions of these names in torch and its methods on tensors, as far as the version of torch has them."""
    owners = (torch, Tensor, F)
    return {getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


_PRODUCTS: Final = _of_tensor(
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "grouped_mm",
    "_grouped_mm",
)  # fmt: skip
_FACTORS: Final = _of_tensor("mul", "multiply", "__mul__", "__rmul__")
_POWERS: Final = _of_tensor("pow", "__pow__")
_ACTIVATIONS: Final = _of_tensor("silu", "gelu", "relu", "square", "rms_norm")


class SavingFunction(OwnMode):
    """Knows which function of PyTorch a layer calls, and thus which one saves a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._called: tuple[Callable[..., Any] | None, tuple[Any, ...]] = (None, ())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before, self._called = self._called, (func, args)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._called = before

    def reads_as_factor(self, t: Tensor) -> bool:
        """Return whether the function that saves a tensor reads it as a factor; see Note: [What stays exact]."""
        func, args = self._called
        if func in _PRODUCTS:
            place = WEIGHT_PLACES.get(func)
            return place is None or not any(_same_memory(t, each) for each in args[place : place + 1])
        if func in _FACTORS:
            return any(each.requires_grad and _same_memory(t, each) for each in _tensors(args))
        if func in _POWERS:
            return len(args) == 2 and args[1] in _SMALL_POWERS
        return func in _ACTIVATIONS


def _tensors(args: Collection[Any]) -> Iterator[Tensor]:
    return (each for each in args if isinstance(each, Tensor))


def _same_memory(t: Tensor, other: Any) -> bool:
    """Return whether two tensors begin at the same address. A DTensor's is that of this process's part."""
    return isinstance(other, Tensor) and local_part(other).data_ptr() == t.data_ptr()


class Compression:
    """Decides which tensors of a slice are compressed.

    Args:
        layer: The layer.
        x: The slice's input, `[batch, tokens, features]`.
        tokens: Number of tokens in each sequence of the slice.

    Attributes:
        saving: Knows the function that saves a tensor, while it is entered.
    """

    def __init__(self, layer: nn.Module, x: Tensor, tokens: int) -> None:
        self._layer, self._features = layer, x.shape[-1]
        self._tokens = (tokens, x.numel() // x.shape[-1])
        self.saving = SavingFunction()

    def covers(self, t: Tensor) -> bool:
        """Return whether a tensor that autograd saves is compressed. It has one device's values."""
        if not t.is_floating_point() or t.itemsize < 2 or not t.dim() or LEAST_SHARE * t.shape[-1] < self._features:
            return False
        if compressed_bytes(t.numel(), t.itemsize) >= t.nbytes or not self.saving.reads_as_factor(t):
            return False
        return is_per_token(t, self._layer, self._tokens)


def is_per_token(t: Tensor, layer: nn.Module, tokens: Collection[int]) -> bool:
    """Return whether a tensor has an entry for each token.

    It has one unless all its sizes are sizes of weights (experts get any number of tokens).

    Args:
        t: The tensor.
        layer: The layer that saves it.
        tokens: Numbers of tokens, of one sequence and of all.
    """
    if any(size in tokens for size in t.shape):
        return True
    weights = [*layer.parameters(), *layer.buffers()]  # quantised ones may be either
    sizes = {1, *(size for w in weights for size in local_part(w).shape)}
    return any(size not in sizes for size in t.shape)
