"""Runs a layer call by the schedule of its slices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.slices.slice_schedules import run_layer_schedule, run_nested


def run_schedule(run: LayerRun, x: Tensor, given: Tensor, nested: bool) -> Any:
    """Run a layer, and return what the layer returns.

    Args:
        run: The layer call.
        x: The layer's input, contiguous.
        given: The tensor that the model has given, of which `x` may be a copy.
        nested: Whether slices are nested.

    Raises:
        ValueError: The layer changes its input in place, and `x` is a copy.
    """
    version = x._version
    output = run_nested(run, x) if nested else run_layer_schedule(run, x)
    if x._version != version:
        if x is not given:
            raise ValueError(
                f"{run.call.name} changes its input in place, which is not contiguous: let the layer compute with a "
                "copy of it (x = x.clone())"
            )
        _Changed.apply(x, torch.zeros((), requires_grad=True), run.call.name)
    return output


class _Changed(torch.autograd.Function):
    """Becomes the history of an input that a layer has changed in place, so that nothing else can be a function of it.

    In plain training, the changed input would be a function of the layer's weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, name: str) -> Tensor:
        ctx.name = name
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        raise ValueError(
            f"{ctx.name} changes its input in place, and the model uses this input afterwards: let the layer compute "
            "with a copy of it (x = x.clone())"
        )
