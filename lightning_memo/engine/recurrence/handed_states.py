"""The states that the slices of a layer hand on, and the gradients of these states, which go back.

Note: [Handed states]
In the forward, a slice gets a copy of the state that the slice before has reached, without history. In the backward,
slices run in reverse. The gradient of the state at the start of a slice is then known before the backward of the slice
before begins, in which it becomes the gradient of the state at the end. Gradients are those of plain training: only the
order of sums differs, at most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.recurrence.state_functions import StateCall


class HandedStates:
    """The states of a layer's recurrences, which its slices share."""

    def __init__(self) -> None:
        self._ends: dict[int, Tensor] = {}  # of the slice that ran last, by the number of the call
        self._gradients: dict[int, Tensor | None] = {}

    def start(self, number: int) -> Tensor:
        """Return the state that call `number` of the slice before has reached, which requires grad if it did."""
        return self._ends[number]

    def run(self, number: int, call: StateCall, start: Tensor | None, last: bool) -> Tensor:
        """Compute a call of the slice that runs, and hand on the state at its end.

        Args:
            number: Number of the call in the layer.
            call: The call.
            start: The state at the start; `None` for the first slice.
            last: Whether no slice follows.
        """
        first = call.by_token[0]
        if start is not None and start.requires_grad:
            start, *passed = _Start.apply(self, number, start, *([first] if first.requires_grad else []))
            first = passed[0] if passed else first
        out, end = call.run(start, first)
        if last:
            self._ends.pop(number, None)
            return out
        self._ends[number] = end.detach().requires_grad_(end.requires_grad)
        return _End.apply(self, number, out, end) if end.requires_grad else out


class _Start(torch.autograd.Function):
    """Gives a slice its first state, and keeps the gradient of that state.

    An argument of the call passes through, so that autograd cannot end the slice's backward before.
    """

    @staticmethod
    def forward(ctx: Any, states: HandedStates, number: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.states, ctx.number = states, number
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in given)

    @staticmethod
    def backward(ctx: Any, dstate: Tensor | None, *passed: Tensor | None) -> tuple[Any, ...]:
        ctx.states._gradients[ctx.number] = dstate
        return None, None, None, *passed


class _End(torch.autograd.Function):
    """Takes the state at the end of a slice, and returns the gradient that the next slice has kept."""

    @staticmethod
    def forward(ctx: Any, states: HandedStates, number: int, out: Tensor, end: Tensor) -> Tensor:
        ctx.states, ctx.number = states, number
        ctx.set_materialize_grads(False)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        return None, None, dout, ctx.states._gradients.pop(ctx.number, None)
