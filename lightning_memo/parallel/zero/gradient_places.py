"""Where the backwards of micro-batches leave gradients: before their reduction over processes, or behind it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.parallel.zero.fsdp_units import fsdp_units, parameter_groups


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
        """Add what the last backward has left to the sum of the earlier ones. Called after each backward."""

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
    """The gradient of a parameter of FSDP2, which a backward without synchronization leaves in one of two places.

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
        fits = gradient is None or gradient.dtype == whole.dtype
        whole.grad = gradient if fits else None
        self._of.unsharded_accumulated_grad = None if fits else gradient

    def add_up(self) -> None:
        # FSDP2 does this at the end of a backward, for gradients of weights that did not wait.
        if hasattr(self._of, "_unsharded_param"):
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
