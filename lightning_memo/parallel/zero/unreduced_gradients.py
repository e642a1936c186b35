"""The gradients of the last backwards, before they are reduced over the processes that hold the same weights."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_memo.parallel.zero.zero_sharding import fsdp_units, parameter_groups


class UnreducedGradient(Protocol):
    """The gradient of a parameter on this process alone.

    Attributes:
        grad: The gradient, whole or a DTensor over tensor-parallel ranks; `None` before a backward.
    """

    grad: Tensor | None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, as optimizers have it."""

    def zeros(self) -> Tensor:
        """Return a gradient of zeros."""


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

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.parameter)


class ShardedGradient:
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

    def zeros(self) -> Tensor:
        return torch.zeros_like(self._of._unsharded_param, dtype=self._of.reduce_dtype)


Gradients = dict[tuple[nn.Module, str], UnreducedGradient]


def unreduced_gradients(module: nn.Module) -> Gradients:
    """Return where backwards without synchronization leave gradients.

    Args:
        module: The module, whose weights have been sharded by FSDP2 or not at all.

    Returns:
        By module and name of the parameter in it. Names of one parameter have the same object.
    """
    found: Gradients = {}
    for unit in fsdp_units(module):
        for of in _parameters_of(unit):
            info, gradient = of._module_info, ShardedGradient(of)
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
