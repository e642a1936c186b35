"""The gradients of a pipeline: those of micro-batches until the loss has its backward, and those of weights that wait.

Note: [Gradients before the backward]
A pipeline runs backwards of micro-batches between forwards of later ones, so that gradients exist before the model has
returned its loss. What a training loop does between the two must not see them: it may drop the gradients of the last
step. The gradients are therefore taken out of the parameters, and put back by the backward of the loss, multiplied by
the gradient of the loss, which is any number: a loop divides losses by the number of batches of a step.

With data or context parallelism and ZeRO 0 or 1, gradients are reduced over the processes that hold the same weights
once for each optimizer step, in the backward of the loss of its last batch. Until then, each process has its own ones,
whole. With ZeRO 2 and 3, the backward of each micro-batch reduces them, and each process holds its shards. All
processes must then multiply by the same number.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from lightning_memo.parallel.fsdp_units import fsdp_units, parameter_groups
from lightning_memo.parallel.local_tensors import ShardedHandle, local_part, resolve_partial

_KEPT_BESIDE: Final = not hasattr(FSDPParam, "unsharded_accumulated_grad")  # see `UnreducedGradient`


class HeldGradients:
    """The gradients of a batch, outside of the parameters.

    Args:
        places: Where backwards leave the gradients of parameters.
        check_factor: Raises a `ValueError` if gradients cannot be multiplied by a number, the gradient of the loss.
    """

    def __init__(self, places: Sequence[GradientPlace], check_factor: Callable[[Tensor], None]) -> None:
        self._places = places
        self._check_factor = check_factor
        self._held: list[tuple[GradientPlace, Tensor]] | None = None

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Within this context, backwards give parameters gradients that are held after it. Earlier ones return."""
        earlier = [place.grad for place in self._places]
        for place in self._places:
            place.grad = None
        try:
            yield
            resolve_partial(self._places)
            self._held = [(place, place.grad) for place in self._places if place.grad is not None]
        finally:
            for place, gradient in zip(self._places, earlier, strict=True):
                place.grad = gradient

    def loss(self, value: Tensor) -> Tensor:
        """Return a loss with this value, whose backward adds the gradients to those of the parameters."""
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        loss: Tensor = _GivesGradients.apply(value, anchor, self)
        return loss

    def give(self, factor: Tensor) -> None:
        """Add the gradients to those of the parameters.

        Args:
            factor: The number by which they are multiplied, a scalar.

        Raises:
            RuntimeError: They were given before.
            ValueError: The number is another one in other processes, and gradients have been reduced already.
        """
        held, self._held = self._held, None
        if held is None:
            raise RuntimeError(
                "a second backward through the same graph (retain_graph) is not supported: sum the losses, or run a "
                "forward for each"
            )
        self._check_factor(factor)
        for place, gradient in held:
            part = local_part(gradient)
            part.mul_(factor)  # which is not rounded to the type of the gradients
            if place.grad is None:
                place.grad = gradient
            else:
                local_part(place.grad).add_(part)


class _GivesGradients(torch.autograd.Function):
    """A number, in whose backward gradients are given that were computed before."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, held: HeldGradients) -> Tensor:
        ctx.held = held
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        with torch.no_grad():
            ctx.held.give(gradient)
        return None, None, None


class GradientPlace(Protocol):
    """The gradient of a parameter, as backwards of micro-batches leave it.

    Attributes:
        grad: The gradient: of this process alone, whole or a DTensor over tensor-parallel ranks, or this process's
            shard of the reduced one; `None` before a backward.
    """

    grad: Tensor | None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, as optimizers have it."""

    def add_up(self) -> None:
        """Add the gradient of the last backward to the sum of the earlier ones. Called after each backward."""

    def fill(self) -> None:
        """Make the gradient zeros if there is none."""


class PlainGradient:
    """The gradient of a parameter that nothing is going to reduce.

    Args:
        parameter: The parameter.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        return self.parameter.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.parameter.grad = gradient

    def add_up(self) -> None:
        pass  # autograd does

    def fill(self) -> None:
        if self.grad is None:
            self.grad = torch.zeros_like(self.parameter)


class UnreducedGradient:
    """The gradient of a parameter of FSDP2, as a backward without synchronization leaves it.

    Since PyTorch 2.15, the gathered weight takes gradients in the dtype of reductions. Before, it takes gradients in
    its own dtype only, and FSDP2 keeps other gradients beside it.

    Args:
        of: FSDP2's own description of the parameter. Gradients are in the dtype of reductions.
    """

    def __init__(self, of: Any) -> None:
        self._of = of

    @property
    def parameter(self) -> nn.Parameter:
        sharded: nn.Parameter = self._of.sharded_param
        return sharded

    @property
    def grad(self) -> Tensor | None:
        accumulated: Tensor | None = self._of.unsharded_accumulated_grad
        whole = getattr(self._of, "_unsharded_param", None)  # there is none before the first forward
        return accumulated if accumulated is not None or whole is None else whole.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        whole = getattr(self._of, "_unsharded_param", None)
        if whole is None:
            assert gradient is None
            return
        fits = not _KEPT_BESIDE or gradient is None or gradient.dtype == whole.dtype
        whole.grad = gradient if fits else None
        if _KEPT_BESIDE:
            self._of.unsharded_accumulated_grad = None if fits else gradient

    def add_up(self) -> None:
        # FSDP2 does this at the end of a backward, for gradients of weights that did not wait.
        if _KEPT_BESIDE and hasattr(self._of, "_unsharded_param"):
            self._of.accumulate_unsharded_grad_if_needed()
            self._of.to_accumulated_grad_if_needed()

    def fill(self) -> None:
        if self.grad is None:
            self.grad = torch.zeros_like(self._of._unsharded_param, dtype=self._of.reduce_dtype)


class ReducedGradient:
    """The gradient of a parameter of FSDP2 that each backward reduces. Shards in 16 bits are added up in fp32.

    Args:
        of: FSDP2's own description of the parameter.
    """

    def __init__(self, of: Any) -> None:
        self._of = of
        self._sum: Tensor | None = None

    @property
    def parameter(self) -> nn.Parameter:
        sharded: nn.Parameter = self._of.sharded_param
        return sharded

    @property
    def grad(self) -> Tensor | None:
        return self.parameter.grad if self._sum is None else self._sum

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._sum = None
        self.parameter.grad = None if gradient is None else gradient.to(self.parameter.dtype)

    def add_up(self) -> None:
        gradient = self.parameter.grad
        if gradient is None or gradient.dtype.itemsize >= torch.float32.itemsize:
            return  # FSDP2 adds up in the dtype of the parameter
        self.parameter.grad = None
        if self._sum is None:
            self._sum = gradient.float()
        else:
            local_part(self._sum).add_(local_part(gradient))

    def fill(self) -> None:
        if self.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
            self.add_up()


Gradients = dict[tuple[nn.Module, str], GradientPlace]


def gradient_places(module: nn.Module, reduced: bool) -> Gradients:
    """Return where backwards of micro-batches leave gradients.

    Args:
        module: The module, whose weights have been sharded by FSDP2 or not at all.
        reduced: Whether each backward reduces gradients.

    Returns:
        By module and name of the parameter in it. Names of one parameter have the same object.
    """
    found: Gradients = {}
    for unit in fsdp_units(module):
        for of in _parameters_of(unit):
            info, gradient = of._module_info, ReducedGradient(of) if reduced else UnreducedGradient(of)
            names = [info.param_name, *info.shared_param_names]
            for home, name in zip([info.module, *info.shared_modules], names, strict=True):
                found[home, name] = gradient
    plain: dict[nn.Parameter, PlainGradient] = {}
    for home in module.modules():
        for name, parameter in home.named_parameters(recurse=False, remove_duplicate=False):
            if (home, name) not in found:
                found[home, name] = plain.setdefault(parameter, PlainGradient(parameter))
    return found


def _parameters_of(unit: FSDPModule) -> list[Any]:
    return [of for group in parameter_groups(unit._get_fsdp_state()) for of in group.fsdp_params]


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
        buffer_owner: Returns the owner of a tensor's memory, which is written again after the backward of its layer;
            `None` if the memory is never written again. Inputs in memory with an owner are copied.
    """

    def __init__(self, buffer_owner: Callable[[Tensor], object | None]) -> None:
        self._buffer_owner = buffer_owner
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
        if (buffer_owner := self._buffer_owner(x)) is not None:
            key = id(buffer_owner), x.data_ptr(), x.shape, x.stride(), x.dtype
            if key not in self._copies:
                self._copies[key] = buffer_owner, x.clone()
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
