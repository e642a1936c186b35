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
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.tensor import DTensor

from lightning_memo.parallel.local_tensors import ShardedHandle, local_part

_linear = torch._C._nn.linear
_REPLACED: Final = (
    'lightning_memo: pipeline_schedule="zero_bubble" has no effect, because torch.nn.functional.linear is {}: put '
    "PyTorch's function back, or leave the setting out"
)
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
        versions: Count changes in place of these two.
    """

    weight: Tensor
    input: Tensor
    gradient: Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor, x: Tensor, gradient: Tensor) -> _Product:
        return cls(weight, x, gradient, (x._version, gradient._version))

    def of_weight(self) -> Tensor:
        """Return the gradient of this rank's part of the weight.

        Raises:
            RuntimeError: The input or the gradient of the output has changed while it waited.
        """
        if self.versions != (self.input._version, self.gradient._version):
            raise RuntimeError(
                'pipeline_schedule="zero_bubble": the input of a linear layer or the gradient of its output was '
                "changed in place after its backward, and the gradient of its weight is still to be computed: return "
                'new tensors from hooks and Functions, or set pipeline_schedule="1f1b"'
            )
        x, dy = self.input.flatten(0, -2), self.gradient.flatten(0, -2)
        return dy.t().mm(x)


class WeightGradients:
    """The gradients of weights that wait, by micro-batch and block of layers.

    Args:
        occupant: Returns what lies in the memory of a tensor until something else is written there, after the backward
            of its layer; `None` if nothing else ever is. Inputs in such memory are copied.
    """

    def __init__(self, occupant: Callable[[Tensor], object | None]) -> None:
        self._occupant = occupant
        self._products: dict[Place, list[_Product]] = {}
        self._present: list[_Product] | None = None
        self._backward = -1
        self._copies: dict[tuple[Any, ...], tuple[object, Tensor]] = {}  # of inputs, which linear layers may share

    @contextlib.contextmanager
    def computing_linear(self) -> Iterator[None]:
        """Within this context, linear layers run so that gradients of their weights can wait.

        If `torch.nn.functional.linear` is a function of the user's, it remains, and no gradients wait.
        """
        before = F.linear
        if before is _linear:
            F.linear = _LinearFunction(self)
        else:
            warnings.warn(_REPLACED.format(before), stacklevel=2)  # the first stage has no such object
        try:
            yield
        finally:
            F.linear = before
            self._products.clear()

    @contextlib.contextmanager
    def waiting(self, place: Place, output: Tensor) -> Iterator[None]:
        """Within this context, the backward of an output leaves gradients of weights for `compute`.

        Args:
            place: The micro-batch and the block of layers.
            output: What the backward begins with.
        """
        self._present = self._products[place] = []
        begins = output.register_hook(self._note_backward)
        try:
            yield
        finally:
            begins.remove()
            self._present, self._backward = None, -1
            self._copies.clear()

    def _note_backward(self, gradient: Tensor) -> None:
        self._backward = torch._C._current_graph_task_id()

    def nbytes(self, place: Place) -> int:
        """Return how much memory is held for the gradients of weights that wait."""
        held = [t for product in self._products.get(place, ()) for t in (product.input, product.gradient)]
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}.values())

    def compute(self, place: Place) -> None:
        """Compute the gradients of weights that wait, and add them to those of the parameters.

        Raises:
            RuntimeError: What they are computed from has changed in place.
        """
        of_weights: dict[Tensor, deque[_Product]] = defaultdict(deque)
        for product in self._products.pop(place, ()):
            of_weights[product.weight].append(product)
        for weight, products in of_weights.items():
            # As autograd does it: what slices of a layer give is added up, and then added to the earlier gradient.
            gradient = products.popleft().of_weight()
            if weight.grad is None and weight.grad_dtype not in (None, weight.dtype):
                # Since PyTorch 2.15, weights that FSDP2 gathers in bf16 take gradients in fp32. Autograd converts what
                # is added up, unless FSDP2 leaves this to the addition to the earlier gradient.
                gradient = gradient.to(weight.grad_dtype)
            while products:  # memory is given back product by product
                more = products.popleft().of_weight()
                gradient = gradient.add_(more) if gradient.dtype is more.dtype else gradient + more
            torch.autograd.backward(weight, _of_parameter(weight, gradient, weight.grad_dtype))

    def keep(self, product: _Product) -> bool:
        """Keep what the gradient of a weight is computed from, if it may wait; returns whether it may.

        It may not in a backward that runs inside of the stage's, because what that is asked for is not known here.
        """
        inside = torch._C._current_graph_task_id() != self._backward
        if self._present is None or inside or torch.is_grad_enabled():
            return False
        x = product.input
        if (occupant := self._occupant(x)) is not None:
            key = id(occupant), x.data_ptr(), x.shape, x.stride(), x.dtype
            if key not in self._copies:
                self._copies[key] = occupant, x.clone()
            product = _Product.of(product.weight, self._copies[key][1], product.gradient)
        self._present.append(product)
        return True


class _LinearFunction:
    """Takes the place of `torch.nn.functional.linear`, for layers with a trained weight of their own.

    A function mode would not see recomputations, as autograd runs backwards without modes.
    """

    def __init__(self, gradients: WeightGradients) -> None:
        self._gradients = gradients

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        parameter = _parameter_of(weight)
        if parameter is None or not _is_usual(input, bias) or not torch.is_grad_enabled():
            return _linear(input, weight, bias)
        x, kind = input, input.device.type
        if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        out: Tensor = _Linear.apply(x, parameter, bias, self._gradients)
        return out


def _is_usual(input: Tensor, bias: Tensor | None) -> bool:
    """Return whether autograd computes the gradients of a linear layer by the products that `_Linear` has."""
    if not input.is_contiguous() or input.dim() < 2 or is_functorch_wrapped_tensor(input):
        return False
    return input.is_floating_point() and (bias is None or bias.dim() == 1)


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
    trained = parameter.is_leaf and parameter.requires_grad and parameter.is_floating_point() and not hooks
    return parameter if trained and type(parameter) in _WEIGHTS else None


class _Linear(torch.autograd.Function):
    """A linear layer whose weight may get its gradient later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # a saved one may come back as another tensor, and the gradient is for this one
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.gradients = gradients
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a weight that is cast here would have no gradient anywhere
        try:
            out = _linear(x, local_part(weight), bias)
            # Autograd forbids changes in place to views that a Function has made.
            return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out
        finally:
            torch.set_autocast_cache_enabled(cached)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            dx = dy.matmul(local_part(weight).to(dy.dtype)) if needs_x else None
            db = dy.flatten(0, -2).sum(0).to(ctx.bias_dtype) if needs_bias else None
            product = _Product.of(weight, x, dy)
            dw = None if ctx.gradients.keep(product) else _of_parameter(weight, product.of_weight(), weight.dtype)
        return dx, dw, db, None


def _of_parameter(parameter: Tensor, gradient: Tensor, dtype: torch.dtype | None) -> Tensor:
    gradient = gradient if dtype is None else gradient.to(dtype)
    return ShardedHandle.of(parameter, None).wrap(gradient) if isinstance(parameter, DTensor) else gradient
