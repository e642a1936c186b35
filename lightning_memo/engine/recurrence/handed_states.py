"""The states that the slices of a layer hand on, and the gradients of these states, which go back.

Note: [Handed states]
In the forward, a slice gets a copy of the state that the slice before has reached, without history. In the backward,
slices run in reverse. The gradient of the state at the start of a slice is then known before the backward of the slice
before begins, in which it becomes the gradient of the state at the end. Gradients are those of plain training: only the
order of sums differs, at most.

Where processes share the tokens of a sequence, the slice before may be one of another process. The state is received
from there, and its gradient is sent back. A recomputation has the state that was received, and receives nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.recurrence.state_functions import StateCall
from lightning_memo.parallel.context.state_exchange import StateExchange, StateLink, StateShape


class HandedStates:
    """The states of a layer's recurrences, which its slices share.

    Args:
        exchange: Sends states to other processes; `None` if this one holds all tokens of a sequence.
        by_slice: Whether processes share the tokens of every slice. Otherwise, each has its own slices.
    """

    def __init__(self, exchange: StateExchange | None = None, by_slice: bool = False) -> None:
        self.exchange, self._by_slice = exchange, by_slice
        self._ends: dict[int, Tensor] = {}  # of the slice that ran last, by the number of the call
        self._gradients: dict[int, Tensor | None] = {}

    def start(self, number: int, call: StateCall, first: bool) -> Tensor | None:
        """Return the state at the start of the slice that runs, which requires grad if the one before it did.

        Args:
            number: Number of the call in the layer.
            call: The call.
            first: Whether the slice is the first one of this process.

        Returns:
            The state; `None` at the start of a sequence.
        """
        source, exchange = self._before(first), self.exchange
        if source is None or exchange is None:
            return None if first else self._ends[number]
        shape = exchange.shape_of(call.form, call.find_shape)
        return exchange.receive(shape, source).requires_grad_(shape.requires_grad)

    def run(self, number: int, call: StateCall, start: Tensor | None, first: bool, last: bool) -> Tensor:
        """Compute a call of the slice that runs, and hand on the state at its end.

        Args:
            number: Number of the call in the layer.
            call: The call.
            start: The state at the start; `None` at the start of a sequence.
            first: Whether the slice is the first one of this process.
            last: Whether no slice of this process follows.
        """
        tokens = call.by_token[0]
        if start is not None and start.requires_grad:
            passing = [tokens] if tokens.requires_grad else []
            start, *passed = _Start.apply(self, number, self._before(first), start, *passing)
            tokens = passed[0] if passed else tokens
        out, end = call.run(start, tokens)
        target, exchange = self._after(last), self.exchange
        if target is not None and exchange is not None:
            exchange.send(end.detach(), target)
        elif last:
            self._ends.pop(number, None)
            return out
        else:
            self._ends[number] = end.detach().requires_grad_(end.requires_grad)
        return _End.apply(self, number, target, out, end) if end.requires_grad else out

    def check(self, name: str, why: str) -> None:
        """Refuse a recurrence that takes or returns no state, if processes share the tokens of a sequence.

        Args:
            name: Name of the layer.
            why: Why it does not.

        Raises:
            ValueError: They do.
        """
        if self.exchange is not None:
            raise ValueError(
                f"in {name}, {why}, and the tokens of a sequence are divided over processes: train this model with "
                "context_parallel_size=1"
            )

    def settle(self) -> None:
        """Wait until other processes have got what was sent to them."""
        if self.exchange is not None:
            self.exchange.settle()

    def _before(self, first: bool) -> StateLink | None:
        return None if self.exchange is None else self.exchange.before(first, self._by_slice)

    def _after(self, last: bool) -> StateLink | None:
        return None if self.exchange is None else self.exchange.after(last, self._by_slice)

    def _return_gradient(self, number: int, to: StateLink | None, gradient: Tensor | None, start: StateShape) -> None:
        """Give the gradient of a start to the slice before."""
        if to is None or self.exchange is None:
            self._gradients[number] = gradient
        else:  # which waits for a gradient, even if it is zero
            self.exchange.send(start.zeros() if gradient is None else gradient, to)

    def _take_gradient(self, number: int, source: StateLink | None, end: StateShape) -> Tensor | None:
        """Return the gradient of an end from the slice after."""
        if source is None or self.exchange is None:
            return self._gradients.pop(number, None)
        return self.exchange.receive(end, source)


class _Start(torch.autograd.Function):
    """Gives a slice its first state, and returns the gradient of that state.

    An argument of the call passes through, so that autograd cannot end the slice's backward before.
    """

    @staticmethod
    def forward(
        ctx: Any, states: HandedStates, number: int, source: StateLink | None, *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.states, ctx.number, ctx.source, ctx.shape = states, number, source, StateShape.of(given[0])
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in given)

    @staticmethod
    def backward(ctx: Any, dstate: Tensor | None, *passed: Tensor | None) -> tuple[Any, ...]:
        ctx.states._return_gradient(ctx.number, ctx.source, dstate, ctx.shape)
        return None, None, None, None, *passed


class _End(torch.autograd.Function):
    """Takes the state at the end of a slice, and returns the gradient that the next slice has found."""

    @staticmethod
    def forward(
        ctx: Any, states: HandedStates, number: int, target: StateLink | None, out: Tensor, end: Tensor
    ) -> Tensor:
        ctx.states, ctx.number, ctx.target, ctx.shape = states, number, target, StateShape.of(end)
        ctx.set_materialize_grads(False)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, dout, ctx.states._take_gradient(ctx.number, ctx.target, ctx.shape)
