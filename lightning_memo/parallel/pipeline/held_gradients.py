"""Holds the gradients of a pipeline's backwards until the backward of the loss that the model has returned.

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
from typing import Any

import torch
from torch import Tensor

from lightning_memo.parallel.clip_gradients import resolve_partial
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.parallel.zero.gradient_places import GradientPlace


class HeldGradients:
    """The gradients of a batch, outside of the parameters.

    Args:
        places: Where backwards leave the gradients of parameters.
        check_factor: Raises a `ValueError` if gradients cannot be multiplied by a number, the gradient of the loss.
    """

    def __init__(self, places: Sequence[GradientPlace], check_factor: Callable[[Tensor], None]) -> None:
        self._places, self._check_factor = places, check_factor
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
