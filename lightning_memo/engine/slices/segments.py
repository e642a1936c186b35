"""Segments of layer calls that store nothing in the forward, and run again in the backward.

Note: [Segments]
A plan for a host that cannot hold what all layer calls store divides them into segments. Calls of the last one run as
always. Those of each other segment only compute their outputs in the forward; the input of its first call waits on the
host. When the backward reaches the segment, its calls run again, and store what the backward needs. Each call has a
node of its own in the graph of the step, so that hooks of FSDP2 and gradients of outputs that the model uses elsewhere
are those of layers that run once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.collected_outputs import ExtraOutputs, collecting_nothing
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.memory.offloaded_tensor import OffloadedTensor
from lightning_memo.engine.modules.layer_forward import run_eager
from lightning_memo.engine.slices.slice_schedules import forward_only, run_forward, with_sides
from lightning_memo.engine.state.random_states import ForwardDraws
from lightning_memo.parallel.fsdp_units import gathered_within_backward
from lightning_memo.utils.retained_graph import NOT_RETAINED, first_derivative, graph_is_retained

# Opens the run of a layer call whose tensors are stored.
Opened = Callable[[LayerCall, Tensor], LayerRun]


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer call that runs again.

    Attributes:
        run: The run of its forward, which has stored nothing.
        draws: The random states of the forward.
        opened: Opens the run that stores tensors.
        needs_gradient: Whether its input needs a gradient.
    """

    run: LayerRun
    draws: ForwardDraws
    opened: Opened
    needs_gradient: bool

    def run_again(self, x: Tensor) -> _Again:
        """Run the forward again, and store what its backward needs."""
        variables = self.run.forward_context.variables.copy()
        again: _Again = variables.run(run_eager, self._run_again, x)
        return again

    def _run_again(self, x: Tensor) -> _Again:
        call, context = self.run.arguments.restored_call(), self.run.forward_context
        arrived = _Gradient()
        with context.replayed(self.draws) as copies, gathered_within_backward(call.layer), collecting_nothing():
            x = x.detach()
            if self.needs_gradient:
                x = _TakeGradient.apply(arrived, x.requires_grad_())
            run = self.opened(call, x)
            with run.arguments.with_copies(copies):
                token, _ = run_forward(run, x)
        return _Again(run, token, arrived)


@dataclass(slots=True)
class _Gradient:
    """Holds the gradient of a call's input."""

    value: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Again:
    """A layer call that has run again.

    Attributes:
        run: The run.
        token: The scalar at which its backward begins.
        gradient: Where its backward leaves the gradient of the input.
    """

    run: LayerRun
    token: Tensor
    gradient: _Gradient

    def backward(self, dy: Tensor) -> Tensor | None:
        """Return the gradient of the input, given that of the output."""
        self.run.begin_output_gradient(dy)
        torch.autograd.backward(self.token)
        return self.gradient.value


class Segment:
    """Consecutive layer calls, each of which gets the output of the one before, that run again in the backward.

    Args:
        number: Number of the segment.
        x: The input of its first call, without autograd history, on the host.
    """

    def __init__(self, number: int, x: Tensor) -> None:
        self._number = number
        self._input: Tensor | None = x
        self._calls: list[_Call] = []
        self._again: list[_Again] = []
        self._output: weakref.ref[object] = weakref.ref(self)  # of the last call

    def continues(self, number: int, x: Tensor) -> bool:
        """Return whether a call of segment `number` with the input `x` is the next call of this one."""
        lazy = isinstance(x, OffloadedTensor) and not x.is_real  # others may have been changed in place
        return lazy and number == self._number and self._output() is x.source

    def run(self, run: LayerRun, x: Tensor, opened: Opened) -> Any:
        """Run a layer so that its backward runs it again, and return what it returns.

        Args:
            run: The layer call.
            x: Its input.
            opened: Opens the run that stores tensors.

        Raises:
            ValueError: The layer has arguments or outputs through which other gradients would go.
        """
        _check_arguments(run.call)
        draws = run.forward_context.draws(noted=False)
        y, sides = forward_only(run, x)
        draws.end_forward()
        _check_outputs(run.call, sides)
        call = CallOfSegment(self, len(self._calls))
        self._calls.append(_Call(run, draws, opened, x.requires_grad))
        run.engine.calls.add(run.key, call)
        anchor = x if x.requires_grad else torch.zeros((), device=x.device, requires_grad=True)
        y = _RunAgain.apply(call, [y], anchor)
        self._output = weakref.ref(y.source)
        return with_sides(y, sides, run)

    def backward(self, call: CallOfSegment, dy: Tensor) -> Tensor | None:
        """Return the gradient of the input of a call, given that of its output."""
        run, number = self._calls[call.number].run, call.number
        calls = run.engine.calls
        calls.begin_backward(call)
        del self._again[number + 1 :]  # of a backward that has ended before these
        if len(self._again) <= number:
            self._run_again(number)
        dx = self._again.pop().backward(dy)
        calls.leave_backward(call)
        if not graph_is_retained():
            calls.remove(run.key, call)
        return dx

    def _run_again(self, last: int) -> None:
        """Run all calls up to a last one.

        Raises:
            RuntimeError: The input of the segment is gone.
        """
        x = self._input
        if x is None:
            raise RuntimeError(NOT_RETAINED)
        if not graph_is_retained():
            self._input = None
        self._again.clear()
        for call in self._calls[: last + 1]:
            self._again.append(call.run_again(x))
            x = self._again[-1].run.take_output()


@dataclass(frozen=True, eq=False)  # without slots, for weak references
class CallOfSegment:
    """A layer call of a segment, which lives as long as its place in the graph.

    Attributes:
        segment: The segment.
        number: Number of the call in it.
    """

    segment: Segment
    number: int


class _RunAgain(torch.autograd.Function):
    """Gives the output of a layer call that has stored nothing its place in the graph."""

    @staticmethod
    def forward(ctx: Any, call: CallOfSegment, output: list[Tensor], anchor: Tensor) -> Tensor:
        ctx.call, ctx.anchor = call, anchor.dim() == 0
        return output.pop()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx = ctx.call.segment.backward(ctx.call, dy)
        return None, None, (torch.zeros((), device=dy.device) if ctx.anchor else dx)


class _TakeGradient(torch.autograd.Function):
    """Takes the gradient of its input, which has no further history."""

    @staticmethod
    def forward(ctx: Any, taken: _Gradient, x: Tensor) -> Tensor:
        ctx.taken = taken
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        ctx.taken.value = dx
        return None, None


_OTHERWISE = "raise host_memory until the plan runs no layers again, or shorten the sequence"


def _check_arguments(call: LayerCall) -> None:
    tensors = (t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor))
    if any(t.requires_grad and not t.is_leaf for t in tensors):
        raise ValueError(
            f"{call.name} has to run again in the backward, as the host cannot hold what it stores, but gets another "
            f"argument that needs a gradient: {_OTHERWISE}"
        )


def _check_outputs(call: LayerCall, sides: list[ExtraOutputs]) -> None:
    values = [*(side.values for side in sides), *(list(side.collected.values()) for side in sides)]
    if any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_leaves(values)):
        raise ValueError(
            f"{call.name} has to run again in the backward, as the host cannot hold what it stores, but has other "
            f"outputs than hidden states, through which gradients may go: {_OTHERWISE}"
        )
