"""A layer's matrix products with its own weights: naming them, timing them, and answering them from storage.

Note: [Answered products]
A recomputation has to deliver the tensors that the forward saved, in the same order, including those of a product that
is not computed again. PyTorch decides which tensors these are (views of the product's input, of autocast's copy of it,
of a weight). Therefore the product is called as before, and only its kernel below autograd is replaced: the result is
read from storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.engine.forward.intercept import OwnMode

Compute = Callable[[], Tensor]
OnProduct = Callable[[str, Compute], Tensor]

# Where each function takes the weight.
WEIGHT_PLACES = {
    F.linear: 1,
    torch.matmul: 1,
    torch.mm: 1,
    Tensor.matmul: 1,
    Tensor.mm: 1,
    torch.addmm: 2,
}
# Kinds of tensors that are no products: a weight with such a name keeps its suffix.
_TAKEN = ("input", "attention", "all", "out", "lse", "query", "key", "value", "other", "shared")
_KERNELS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class ProductMode(OwnMode):
    """Passes the matrix products of a layer's forward to a function, with the names of their weights in the layer.

    If a weight is used again, a number is appended to its name. Products inside attention, with parts of weights
    (experts) and with DTensors are computed as usual.

    Args:
        layer: The layer.
        on_product: Called with a product's name and a function that computes the product; returns its output.
    """

    def __init__(self, layer: nn.Module, on_product: OnProduct) -> None:
        super().__init__()
        self._names = {id(p): _short(name) for name, p in layer.named_parameters() if not isinstance(p, DTensor)}
        self._on_product = on_product
        self._counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place = WEIGHT_PLACES.get(func)
        if place is None or len(args) <= place or self.inside:
            return func(*args, **kwargs)
        name = self._names.get(id(args[place]))
        if name is None:
            return func(*args, **kwargs)
        return self._on_product(self._number(name), lambda: func(*args, **kwargs))

    def _number(self, name: str) -> str:
        self._counts[name] += 1
        return name if self._counts[name] == 1 else f"{name}#{self._counts[name]}"


class MeasuredProduct(TorchDispatchMode):
    """Times the kernel of one matrix product, and notes whether the kernel's output is the product's output.

    Args:
        now: Returns the present point in time.

    Attributes:
        out: The kernel's output, `[rows, columns]`; `None` if several kernels ran or the output was changed.
        started: When the kernel began.
        stopped: When the kernel ended.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        super().__init__()
        self.out: Tensor | None = None
        self.started = self.stopped = None
        self._now, self._kernels = now, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _KERNELS:
            if not _is_view(func):
                self.out = None
            return func(*args, **(kwargs or {}))
        self._kernels += 1
        self.started = self._now()
        out = func(*args, **(kwargs or {}))
        self.stopped = self._now()
        self.out = out if self._kernels == 1 and out.is_contiguous() else None
        return out


class AnsweredProduct(TorchDispatchMode):
    """Reads a matrix product from storage instead of computing it; see Note: [Answered products].

    Args:
        stored: The product's output, contiguous.
    """

    def __init__(self, stored: Tensor) -> None:
        super().__init__()
        self._stored = stored
        self._answered = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KERNELS and not self._answered:
            self._answered = True
            left, right = args[-2:]
            return self._stored.view(left.shape[0], right.shape[1])
        if self._answered and not _is_view(func):
            raise RuntimeError(
                f"the recomputation of a stored matrix product also calls {func}: keep the types and layouts of the "
                'layer\'s input and weights alike in all steps, or set storage="alpha"'
            )
        return func(*args, **(kwargs or {}))


def _short(name: str) -> str:
    short = name.removesuffix(".weight")
    return name if short in _TAKEN else short


def _is_view(func: Any) -> bool:
    return bool(func.is_view) or func is torch.ops.aten._unsafe_view.default
