"""Known tensors, for example results of attention, that autograd takes for functions of other tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_memo.utils.retained_graph import NEVER_DIFFERENTIATED


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
