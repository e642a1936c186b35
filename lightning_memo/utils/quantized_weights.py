"""The tensors that quantised weights of bitsandbytes and torchao are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def scales_of(weight: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that bitsandbytes keeps beside a weight: scales of 8 bits, or those of 4 bits with their codes.

    The scales of 4 bits may be quantised again, and then have scales of their own.
    """
    if isinstance(scales := getattr(weight, "SCB", None), Tensor):
        yield scales
    state: Any = getattr(weight, "quant_state", None)
    while state is not None:
        yield from (value for value in vars(state).values() if isinstance(value, Tensor))
        state = getattr(state, "state2", None)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with bytes of their own that a weight, which is not sharded, is made of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    else:
        yield tensor
        yield from scales_of(tensor)
