"""The gradients of micro-batches, from the places where backwards leave them to the backward of the model's loss.

Note: [Gradients before the backward]
A pipeline runs backwards of micro-batches between forwards of later ones, so that gradients exist before the model has
returned its loss. What a training loop does between the two must not see them: it may drop the gradients of the last
step. The gradients are therefore taken out of the parameters, and put back by the backward of the loss, multiplied by
the gradient of the loss, which is any number: a loop divides losses by the number of batches of a step.

With data or context parallelism and ZeRO 0 or 1, gradients are reduced over the processes that hold the same weights
once for each optimizer step, in the backward of the loss of its last batch. Until then, each process has its own ones,
whole. With ZeRO 2 and 3, the backward of each micro-batch reduces them, and each process holds its shards. All
processes must then multiply by the same number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lightning_memo.parallel.local_tensors import local_part, resolve_partial
from lightning_memo.parallel.zero.fsdp_units import fsdp_units, parameter_groups

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
