"""A layer's matrix products with its own weights: naming them, timing them, and answering them from storage.

Note: [Answered products]
A recomputation has to deliver the tensors that the forward saved, in the same order, including those of a product that
is not computed again. PyTorch decides which tensors these are (views of the product's input, of autocast's copy of it,
of a weight). Therefore the product is called as before, and only its kernel below autograd is replaced: the result is
read from storage.

Note: [Sums of products]
LoRA adds products of a layer's modules. The backward of `base(x) + B(A(x)) * scaling` reads `x` and `A(x)`, and none of
the terms. If the sum is in storage, neither the product of the base layer nor that of `B` has to be computed, nor their
sum. They are called as before, and the stored sum stands for each of the terms, which nothing but the sum may read.

If the adapters have another type than the base layer, the sum is cast to the type of `base(x)`. The cast is a part of
the sum, and its output is stored, which has that type: half of the bytes if adapters in fp32 train beside a base layer
in bf16. It stands for terms and sums of both types, because autograd saves none of them.

If the sum is not in storage, each term is computed when it is read. Nothing reads the base layer's product in the last
module of a layer, because the recomputation ends when `A(x)` is computed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, TracebackType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from lightning_memo.artifacts.costs import is_product
from lightning_memo.engine.forward.intercept import OwnMode

Compute = Callable[[], Tensor]
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

    def term(self, name: str, compute: Compute) -> Tensor:
        """Compute a product that is a term of the sum that is being computed."""

    def sum(self, name: str, compute: Compute) -> Tensor:
        """Compute the output of a module of this name that LoRA adapts."""


class ProductMode(OwnMode):
    """Passes the matrix products of a layer's forward to an object, with the names of their weights in the layer.

    If a weight is used again, a number is appended to its name. Products inside attention, with parts of weights
    (experts) and with DTensors are computed as usual.

    Args:
        layer: The layer.
        products: Computes products, and the modules that LoRA adapts; see Note: [Sums of products].
    """

    def __init__(self, layer: nn.Module, products: Products) -> None:
        super().__init__()
        self._layer, self._products = layer, products
        self._names: dict[int, str] = {}
        self._adapted = [(_untaken(name), *rest) for name, *rest in adapted_modules(layer)]
        self._counts: Counter[str] = Counter()
        self._terms = frozenset[int]()
        self._replaced = contextlib.ExitStack()

    @property
    def adapts(self) -> bool:
        """Whether LoRA adapts modules of the layer."""
        return bool(self._adapted)

    @override
    def __enter__(self) -> Self:
        named = self._layer.named_parameters()
        self._names = {id(p): _short(name) for name, p in named if not isinstance(p, DTensor)}
        for name, module, terms in self._adapted:
            forward = SummingForward(functools.partial(self._sum, name, terms), type(module).forward.__get__(module))
            self._replaced.enter_context(_replaced_forward(module, forward))
        return super().__enter__()

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._replaced.close()

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
        compute = self._products.term if id(args[place]) in self._terms else self._products.product
        return compute(self._number(name), lambda: func(*args, **kwargs))

    def _sum(self, name: str, terms: frozenset[int], compute: Compute) -> Tensor:
        if self.inside:
            return compute()
        self._terms = terms
        try:
            return self._products.sum(self._number(name), compute)
        finally:
            self._terms = frozenset()

    def _number(self, name: str) -> str:
        self._counts[name] += 1
        return name if self._counts[name] == 1 else f"{name}#{self._counts[name]}"


@contextlib.contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    # Not by `nn.Module.__setattr__`, which users' classes may override.
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        if before is not None:  # slices may be nested
            own["forward"] = before


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


def adapted_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module, frozenset[int]]]:
    """Yield the modules of a layer that peft's LoRA adapts, with their names and the ids of the terms' weights.

    Left out are modules with a variant of LoRA that reads terms (DoRA), and those whose forward or parts are a user's
    own, which might read terms past PyTorch's operators.
    """
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None:
        return
    for name, module in layer.named_modules():
        if not (isinstance(module, lora.Linear) and type(module).forward is lora.Linear.forward):
            continue
        own = not isinstance(vars(module).get("forward"), (NoneType, SummingForward))
        if own or any(adapter in module.lora_variant for adapter in module.active_adapters):
            continue
        if not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules() if part is not module):
            # Not `term.weight`, which parametrizations compute, and would save for the backward.
            weights = [term._parameters.get("weight") for term in (module.base_layer, *module.lora_B.values())]
            yield name, module, frozenset(id(weight) for weight in weights if type(weight) is nn.Parameter)


@dataclass(frozen=True, slots=True)
class SummingForward:
    """Stands in for the forward of an adapted module.

    Attributes:
        run: Called with the module's own forward, bound to its arguments; returns the output.
        forward: The module's own forward.
    """

    run: Callable[[Callable[[], Tensor]], Tensor]
    forward: Callable[..., Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(lambda: self.forward(*args, **kwargs))
