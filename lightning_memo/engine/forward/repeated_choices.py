"""What a recomputation is told instead of computing it: choices by value, such as of a router, and known results.

Note: [Repeated choices]
Kernels may sum in another order in each run. A recomputation then differs from the forward in its last bits, and a
router near a tie would choose another expert. Tensors that were saved and tensors that are computed again would not
belong together, and the gradient would be that of neither choice. Therefore the indices are kept on the device: 2 bytes
for each token and expert. Choices among weights need no indices: weights have the same values again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.forward.intercept import OwnMode
from lightning_memo.utils.retained_graph import NEVER_DIFFERENTIATED

# Functions that choose along a dimension, with the place of the dimension among their arguments.
_CHOOSING: dict[Callable[..., Any], int] = {
    torch.topk: 2, Tensor.topk: 2, torch.sort: 1, Tensor.sort: 1, torch.argsort: 1, Tensor.argsort: 1,
    torch.max: 1, Tensor.max: 1, torch.min: 1, Tensor.min: 1,
    torch.argmax: 1, Tensor.argmax: 1, torch.argmin: 1, Tensor.argmin: 1,
}  # fmt: skip
_OF_LAST = ("topk", "sort", "argsort")  # choose along the last dimension if none is given


class _ChoiceMode(OwnMode):
    """Finds choices by values that a recomputation may compute with other last bits.

    Args:
        fixed: The tensors that are not computed again. A choice by their values needs no indices.
    """

    def __init__(self, fixed: Container[Tensor]) -> None:
        super().__init__()
        self._fixed = fixed

    def _dim_of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the dimension along which a function chooses; `None` if it makes no such choice."""
        dim = _dim_of_choice(func, args, kwargs)
        return None if dim is None or self.inside or args[0] in self._fixed else dim


class NotedChoices(_ChoiceMode):
    """Passes the indices that a layer chooses by values to a function.

    Args:
        on_choice: Called with the indices of each choice, in a dtype that needs little memory.
        fixed: The tensors that a recomputation does not compute again.
    """

    def __init__(self, on_choice: Callable[[Tensor], None], fixed: Container[Tensor] = ()) -> None:
        super().__init__(fixed)
        self._on_choice = on_choice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dim = self._dim_of(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if dim is not None:
            indices = result if isinstance(result, Tensor) else result[1]
            self._on_choice(indices.to(torch.int16 if args[0].shape[dim] <= 2**15 else torch.int32))
        return result


class RepeatedChoices(_ChoiceMode):
    """Answers choices with indices that were noted; see Note: [Repeated choices].

    Args:
        choices: The indices of each choice, in order.
        fixed: The tensors that are not computed again.
    """

    def __init__(self, choices: Sequence[Tensor], fixed: Container[Tensor] = ()) -> None:
        super().__init__(fixed)
        self._choices: Iterator[Tensor] = iter(choices)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dim = self._dim_of(func, args, kwargs or {})
        if dim is None:
            return func(*args, **(kwargs or {}))
        indices = next(self._choices).long()
        name = func.__name__
        if name in ("argmax", "argmin"):
            return indices
        values = _Chosen.apply(args[0], indices, dim)
        return indices if name == "argsort" else getattr(torch.return_types, name)((values, indices))


def _dim_of_choice(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the dimension along which a function chooses; `None` if it does not choose by values that vary."""
    place = _CHOOSING.get(func)
    if place is None or not args or not args[0].is_floating_point() or "out" in kwargs:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(args[0]):  # inside `torch.vmap`
        return None
    dim = kwargs.get("dim", args[place] if len(args) > place else -1 if func.__name__ in _OF_LAST else None)
    return dim if isinstance(dim, int) else None


class _Chosen(torch.autograd.Function):
    """The values at indices. It saves what the functions that choose save: the indices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(indices)
        if indices.dim() == x.dim():
            return x.gather(dim, indices)
        return x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(NEVER_DIFFERENTIATED)


def as_function_of(known: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return a known tensor that requires grad if an input does, so that later operations may change it in place."""
    made: Tensor = _Known.apply(known, *inputs)
    return made


class _Known(torch.autograd.Function):
    """Has no backward: its graph is never differentiated."""

    @staticmethod
    def forward(ctx: Any, known: Tensor, *inputs: Tensor | None) -> Tensor:
        return known.detach()

    @staticmethod
    def backward(ctx: Any, dknown: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(NEVER_DIFFERENTIATED)
