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
from contextvars import Token
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from lightning_memo.artifacts.costs import is_product
from lightning_memo.engine.forward.adapted_linear import OUTPUT, Compute, Output, adapted_modules
from lightning_memo.engine.forward.intercept import OwnMode

Span = tuple[Any, Any]
"""When something began and ended."""

KERNELS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

# Where each function takes the weight.
WEIGHT_PLACES = {
    F.linear: 1,
    torch.matmul: 1,
    torch.mm: 1,
    Tensor.matmul: 1,
    Tensor.mm: 1,
    torch.addmm: 2,
}


class Products(Protocol):
    """What computes the matrix products of a layer; each method returns the output."""

    def product(self, name: str, compute: Compute) -> Tensor:
        """Compute a product with a weight of this name."""

    def adapted(self, name: str, compute: Compute) -> Tensor:
        """Compute the output of a module of this name that LoRA adapts, below autograd."""


class ProductMode(OwnMode):
    """Passes the matrix products of a layer's forward to an object, with the names of their weights in the layer.

    If a weight is used again, a number is appended to its name. Products inside attention, with parts of weights
    (experts) and with DTensors are computed as usual.

    Args:
        layer: The layer.
        products: Computes products, and the modules that LoRA adapts.
        ends_with: Returns whether nothing runs after autograd has saved some tensors; it would not be computed.
    """

    def __init__(
        self, layer: nn.Module, products: Products, ends_with: Callable[[tuple[Tensor, ...]], bool] = lambda _: False
    ) -> None:
        super().__init__()
        self._layer, self._products, self._ends_with = layer, products, ends_with
        self._names: dict[int, str] = {}
        self._adapted = {module: _untaken(name) for name, module in adapted_modules(layer)}
        self._counts: Counter[str] = Counter()
        self._token: Token[Output | None] | None = None

    @property
    def adapts(self) -> bool:
        """Whether LoRA adapts modules of the layer."""
        return bool(self._adapted)

    @override
    def __enter__(self) -> Self:
        named = self._layer.named_parameters()
        self._names = {id(p): _short(name) for name, p in named if not isinstance(p, DTensor)}
        self._token = OUTPUT.set(self._output)
        return super().__enter__()

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        assert self._token is not None
        OUTPUT.reset(self._token)

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
        return self._products.product(self._number(name), lambda: func(*args, **kwargs))

    def _output(self, module: nn.Module, compute: Compute, saved: tuple[Tensor, ...]) -> Tensor | None:
        if self.inside:  # another slice runs while this one waits for attention
            return compute()
        if self._ends_with(saved):
            return None
        name = self._adapted.get(module)
        return compute() if name is None else self._products.adapted(self._number(name), compute)

    def _number(self, name: str) -> str:
        self._counts[name] += 1
        return name if self._counts[name] == 1 else f"{name}#{self._counts[name]}"


class MeasuredProduct(TorchDispatchMode):
    """Times the kernel of one matrix product, and notes whether the kernel's output is the product's output.

    Args:
        now: Returns the present point in time.

    Attributes:
        out: The kernel's output, `[rows, columns]`; `None` if several kernels ran or the output was changed.
        span: When the kernel began and ended.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        super().__init__()
        self.out: Tensor | None = None
        self.span: Span = (None, None)
        self._now, self._kernels = now, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in KERNELS:
            if not is_view(func):
                self.out = None
            return func(*args, **(kwargs or {}))
        self._kernels += 1
        started = self._now()
        out = func(*args, **(kwargs or {}))
        self.span = started, self._now()
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
        if func in KERNELS and not self._answered:
            self._answered = True
            left, right = args[-2:]
            return self._stored.view(left.shape[0], right.shape[1])
        if self._answered and func is torch.ops.aten.add.Tensor:  # the bias, if the input has gaps; it is in storage
            return torch.ops.aten.alias(args[0])
        if self._answered and not is_view(func):
            raise RuntimeError(
                f"the recomputation of a stored matrix product also calls {func}: keep the types and layouts of the "
                "layer's input and weights alike in all steps, or give alpha, like alpha=0.5"
            )
        return func(*args, **(kwargs or {}))


def is_view(func: Any) -> bool:
    """Return whether an operator of PyTorch returns a view of its input."""
    return bool(func.is_view) or func is torch.ops.aten._unsafe_view.default


def _untaken(name: str) -> str:
    return name if is_product(name) else f"{name}.sum"


def _short(name: str) -> str:
    """Return the name of a product without the suffix of its weight, unless a kind of tensor has that name."""
    short = name.removesuffix(".weight")
    return short if is_product(short) else name
