"""Computes the gradients of the weights of linear layers after a backward, for the zero-bubble order of a pipeline.

Note: [Gradients of weights that wait]
Within `WeightGradients.computing_linear`, linear layers with a trained weight of its own run as a Function whose
backward computes the gradient of the input. Within `WeightGradients.waiting`, it keeps the input and the gradient of
the output for later, and otherwise computes the gradient of the weight at once. Both are the products that autograd
would compute, and for each weight they are added up in the same order, so that all gradients are those of 1F1B to the
last bit. Other weights (norms, embeddings, experts in one tensor, and weights with hooks) get their gradients in the
backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_memo.parallel.local_tensors import ShardedHandle, local_part

_linear = F.linear
_TO_LOCAL: Final = "_ToTorchTensorBackward"  # of `DTensor.to_local`
_WEIGHTS: Final = (nn.Parameter, DTensor)  # and no classes of quantised weights

Place = tuple[int, int]
"""Numbers of a micro-batch and of a block of layers."""


@dataclass(frozen=True, slots=True)
class _Product:
    """What the gradient of a weight is computed from.

    Attributes:
        weight: The parameter, `[outputs, inputs]`, of which this rank may have a part.
        input: Input of the linear layer, `[..., inputs]`.
        gradient: Gradient of its output, `[..., outputs]`.
    """

    weight: Tensor
    input: Tensor
    gradient: Tensor

    def of_weight(self) -> Tensor:
        """Return the gradient of this rank's part of the weight."""
        x, dy = self.input.flatten(0, -2), self.gradient.flatten(0, -2)
        return dy.t().mm(x)


class WeightGradients:
    """The gradients of weights that wait, by micro-batch and block of layers.

    Args:
        is_reused: Returns whether something else is written into the memory of a tensor after the backward of its
            layer. Such inputs are copied.
    """

    def __init__(self, is_reused: Callable[[Tensor], bool]) -> None:
        self._is_reused = is_reused
        self._products: dict[Place, list[_Product]] = {}
        self._present: list[_Product] | None = None
        self._copies: dict[int, tuple[object, Tensor]] = {}  # of inputs, which linear layers may share

    @contextlib.contextmanager
    def computing_linear(self) -> Iterator[None]:
        """Within this context, linear layers run so that gradients of their weights can wait."""
        before = F.linear
        F.linear = _LinearFunction(self)
        try:
            yield
        finally:
            F.linear = before
            self._products.clear()

    @contextlib.contextmanager
    def waiting(self, place: Place) -> Iterator[None]:
        """Within this context, a backward leaves gradients of weights for `compute`.

        Args:
            place: The micro-batch and the block of layers.
        """
        self._present = self._products[place] = []
        try:
            yield
        finally:
            self._present = None
            self._copies.clear()

    def nbytes(self, place: Place) -> int:
        """Return how much memory is held for the gradients of weights that wait."""
        held = [t for product in self._products.get(place, ()) for t in (product.input, product.gradient)]
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}.values())

    def compute(self, place: Place) -> None:
        """Compute the gradients of weights that wait, and add them to those of the parameters."""
        of_weights: dict[Tensor, deque[_Product]] = defaultdict(deque)
        for product in self._products.pop(place, ()):
            of_weights[product.weight].append(product)
        for weight, products in of_weights.items():
            # As autograd does it: what slices of a layer give is added up, and then added to the earlier gradient.
            gradient = products.popleft().of_weight()
            while products:  # memory is given back product by product
                gradient += products.popleft().of_weight()
            torch.autograd.backward(weight, _of_parameter(weight, gradient))

    def keep(self, product: _Product, source: object) -> bool:
        """Keep what the gradient of a weight is computed from, if it may wait; returns whether it may.

        Args:
            product: The input and the gradient of the output of a linear layer.
            source: The same object for linear layers that share an input.
        """
        if self._present is None:
            return False
        if self._is_reused(product.input):
            _, x = self._copies.setdefault(id(source), (source, product.input.clone()))
            product = replace(product, input=x)
        self._present.append(product)
        return True


class _LinearFunction:
    """Takes the place of `torch.nn.functional.linear`, for layers with a trained weight of their own.

    A function mode would not see recomputations, as autograd runs backwards without modes.
    """

    def __init__(self, gradients: WeightGradients) -> None:
        self._gradients = gradients
        self._last: tuple[Callable[[], object], int, object] = (lambda: None), 0, None

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        parameter = _parameter_of(weight)
        if parameter is None or input.dim() < 2 or not torch.is_grad_enabled():
            return _linear(input, weight, bias)
        x, kind = input, input.device.type
        if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        out: Tensor = _Linear.apply(x, parameter, bias, self._gradients, self._source(input))
        return out

    def _source(self, input: Tensor) -> object:
        last, version, source = self._last
        if last() is not input or version != input._version:
            source = object()
            self._last = weakref.ref(input), input._version, source
        return source


def _parameter_of(weight: Tensor) -> Tensor | None:
    """Return the parameter that a weight is, or this rank's part of; `None` if its gradient cannot wait.

    Hooks would get `None` in the backward.
    """
    parameter, node = weight, weight.grad_fn
    if node is not None and node.name() == _TO_LOCAL:
        parameter = getattr(node.next_functions[0][0], "variable", weight)
        if not all(placement.is_shard() for placement in getattr(parameter, "placements", ())):
            return None  # ranks may have parts of the gradient
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    trained = parameter.is_leaf and parameter.requires_grad and not hooks
    return parameter if trained and type(parameter) in _WEIGHTS else None


class _Linear(torch.autograd.Function):
    """A linear layer whose weight may get its gradient later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients, source: object
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # a saved one may come back as another tensor, and the gradient is for this one
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.gradients, ctx.source = gradients, source
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a weight that is cast here would have no gradient anywhere
        try:
            out = _linear(x, local_part(weight), bias)
            # Autograd forbids changes in place to views that a Function has made.
            return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out
        finally:
            torch.set_autocast_cache_enabled(cached)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            dx = dy.matmul(local_part(weight).to(dy.dtype)) if needs_x else None
            db = dy.flatten(0, -2).sum(0).to(ctx.bias_dtype) if needs_bias else None
            product = _Product(weight, x, dy)
            dw = None if ctx.gradients.keep(product, ctx.source) else _of_parameter(weight, product.of_weight())
        return dx, dw, db, None, None


def _of_parameter(parameter: Tensor, gradient: Tensor) -> Tensor:
    gradient = gradient.to(parameter.dtype)
    return ShardedHandle.of(parameter, None).wrap(gradient) if isinstance(parameter, DTensor) else gradient
