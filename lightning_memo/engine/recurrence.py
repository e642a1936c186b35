"""Recurrences and convolutions in layers that run in slices: each slice gets the state at the end of the one before.

transformers' mixers call the functions in which tokens meet in a state by name. Each of these functions stands for
kernels of other packages, if these are installed, which take the same state arguments. Calls are intercepted as those
of attention are.

Note: [Handed states]
In the forward, a slice gets a copy of the state that the slice before has reached, without history. In the backward,
slices run in reverse. The gradient of the state at the start of a slice is then known before the backward of the slice
before begins, in which it becomes the gradient of the state at the end. Gradients are those of plain training: only the
order of sums differs, at most.

Where processes share the tokens of a sequence, the slice before may be one of another process. The state is received
from there, and its gradient is sent back. A recomputation has the state that was received, and receives nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memo.parallel.batches.token_layout import has_whole_rows
from lightning_memo.parallel.context_parallel import StateExchange, StateLink, StateShape
from lightning_memo.utils.replaced_functions import replaced

_QKV = ("query", "key", "value", "g", "beta")
_CHANNELS = ("hidden_states", "weight", "bias", "activation")
_SCANNED = ("hidden_states", "dt", "A", "B", "C", "chunk_size")
# Kernels that join several of these functions take no state. If they return None, mixers call the functions.
_JOINED_FUNCTIONS = ("mamba2_split_conv1d_scan_combined",)
# Kernels of other packages warn of fewer tokens than heads.
_TRIED_TOKENS = 256
_DOCUMENTS = ("seq_idx", "cu_seqlens")


@dataclass(frozen=True, slots=True)
class _StateFunction:
    """A function that hands a state from token to token.

    Attributes:
        names: The names of its first arguments.
        by_token: The arguments that hold one entry for each token. The first one is never left out.
        like: The argument whose shape the result has.
        token_dim: The dimension of tokens in these arguments.
        start: The keyword for the state at the start; empty for a convolution, whose state is a part of its input.
        end: The keyword by which the state at the end is asked for.
        pairs: Whether the function returns a pair in any case.
    """

    names: tuple[str, ...]
    by_token: tuple[str, ...]
    like: str
    token_dim: int
    start: str = ""
    end: str = ""
    pairs: bool = False


_DELTA_RULE = _StateFunction(_QKV, _QKV, "value", 1, "initial_state", "output_final_state", pairs=True)
STATE_FUNCTIONS = {
    "causal_conv1d_fn": _StateFunction(_CHANNELS, _CHANNELS[:1], "hidden_states", 2),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _StateFunction(
        _SCANNED, ("hidden_states", "dt", "B", "C"), "hidden_states", 1, "initial_states", "return_final_states"
    ),
}


class StateCall:
    """One call of a function that hands a state from token to token.

    Args:
        name: Name of the function.
        function: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Attributes:
        token_dim: The dimension of tokens in the arguments that hold them, and in the result.
    """

    def __init__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self._rule, self._function = STATE_FUNCTIONS[name], function
        self._args, self._kwargs = args, kwargs
        self.token_dim = self._rule.token_dim

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments, without those of other functions that mixers pass on."""
        return *self._args, *(self._kwargs[name] for name in _parameters_of(self._function) if name in self._kwargs)

    @property
    def by_token(self) -> list[Tensor]:
        """The arguments that hold one entry for each token."""
        return [self._argument(name) for name in self._rule.by_token]

    @property
    def like(self) -> Tensor:
        """The argument whose shape the result has."""
        t: Tensor = self._argument(self._rule.like)
        return t

    @property
    def form(self) -> Hashable:
        """The properties that calls share whose states are alike: all but the number of tokens, and values."""
        by_token, device = self.by_token, self.like.device.type
        sizes = [(*t.shape[: self.token_dim], *t.shape[self.token_dim + 1 :], t.dtype) for t in by_token]
        others = [t.shape for t in self.arguments if isinstance(t, Tensor) and all(t is not one for one in by_token)]
        trained = [isinstance(t, Tensor) and t.requires_grad for t in self.arguments]
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return self._function, tuple(sizes), tuple(others), tuple(trained), torch.is_grad_enabled(), cast

    def find_shape(self) -> StateShape:
        """Return the shape of the state at the end."""
        few, names = min(_TRIED_TOKENS, self.like.shape[self.token_dim]), self._rule.names
        cut = {name: self._argument(name).narrow(self.token_dim, 0, few) for name in self._rule.by_token}
        args = tuple(cut.get(name, value) for name, value in zip(names, self._args, strict=False))
        kwargs = {name: cut.get(name, value) for name, value in self._kwargs.items()}
        tried = StateCall(self.name, self._function, (*args, *self._args[len(names) :]), kwargs)
        with saved_tensors_hooks(lambda t: t, lambda t: t):  # nothing of it is stored
            return StateShape.of(tried.run()[1])

    def why_not(self) -> str:
        """Return why no state can be handed; empty if it can."""
        if any(self._kwargs.get(name) is not None for name in _DOCUMENTS):
            return f"{self.name} keeps documents of a row apart (seq_idx)"
        if not self._rule.start:
            return ""
        names = _parameters_of(self._function)
        if not {self._rule.start, self._rule.end} <= set(names):  # a user's function in its place
            return f"{self.name} takes or returns no state"
        given = dict(zip(names, self._args, strict=False)) | self._kwargs
        if given.get(self._rule.start) is not None or given.get(self._rule.end):
            return f"{self.name} gets or returns a state of the model"
        return ""

    def run(self, state: Tensor | None = None, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the function.

        Args:
            state: The state at the start; `None` at the start of a sequence.
            first: Takes the place of the first argument that holds tokens; `None` for this argument itself.

        Returns:
            The result, and the state at the end.
        """
        first = self.by_token[0] if first is None else first
        if not self._rule.start:
            return self._convolve(first, state)
        out, end = self._compute(first, {self._rule.start: state, self._rule.end: True})
        return out, end

    def returned(self, out: Tensor) -> Any:
        """Return what the function returns if it is not asked for a state."""
        return (out, None) if self._rule.pairs else out

    def _convolve(self, x: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute a causal convolution of `x`, `[batch, channels, tokens]`, with the last tokens before it."""
        before = 0 if tail is None else tail.shape[-1]
        joined = x if tail is None else torch.cat([tail, x], -1)
        out = self._compute(joined, {})
        missing = self._argument("weight").shape[-1] - 1 - joined.shape[-1]  # zeros come before a sequence
        return (out[..., before:] if before else out), F.pad(joined, (missing, 0)).clone()

    def _compute(self, first: Tensor, changed: dict[str, Any]) -> Any:
        args, kwargs = list(self._args), self._kwargs | changed
        place = self._rule.names.index(self._rule.by_token[0])
        if place < len(args):
            args[place] = first
        else:
            kwargs[self._rule.by_token[0]] = first
        return self._function(*args, **kwargs)

    def _argument(self, name: str) -> Any:
        place = self._rule.names.index(name)
        return self._args[place] if place < len(self._args) else self._kwargs[name]


@functools.cache
def _parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


# Computes a call on the tokens that it got.
StateHandler = Callable[[StateCall], Tensor]


def may_hand_states(model: nn.Module) -> bool:
    """Return whether some module of a model may call a function that hands a state from token to token."""
    return any(_functions_of(type(module)) for module in model.modules())


@contextmanager
def handing(layer: nn.Module, hand: StateHandler, refuse: Callable[[str], None]) -> Iterator[None]:
    """Inside, calls of functions that hand a state from token to token go to `hand`.

    Args:
        layer: The layer that runs.
        hand: Answers the calls.
        refuse: Told why, if the layer calls a function in a way in which no state can be handed.
    """
    places = {(id(home), name): home for m in layer.modules() for home, name in _functions_of(type(m))}
    with ExitStack() as stack:
        for (_, name), home in places.items():
            stack.enter_context(replaced(home, name, functools.partial(_answer, name, hand, refuse), chained=False))
        yield


def _answer(
    name: str,
    hand: StateHandler,
    refuse: Callable[[str], None],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Answer a call of a function in a module of transformers whose classes call it by name."""
    if has_whole_rows():
        return function(*args, **kwargs)
    if name in _JOINED_FUNCTIONS:
        return None
    call = StateCall(name, function, args, kwargs)
    if why := call.why_not():
        refuse(why)
        return function(*args, **kwargs)
    return call.returned(hand(call))


@functools.cache
def _functions_of(kind: type[nn.Module]) -> tuple[tuple[ModuleType, str], ...]:
    """Return the functions that a class of transformers may call: the Python module, and the name in it."""
    homes = [sys.modules[c.__module__] for c in kind.__mro__ if c.__module__.startswith("transformers.")]
    return tuple(
        (home, name) for home in homes for name in (*STATE_FUNCTIONS, *_JOINED_FUNCTIONS) if hasattr(home, name)
    )


class RecurrentStates:
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

    def rewind(self) -> None:
        """End a backward that another one may follow."""
        self._gradients.clear()

    def settle(self) -> None:
        """Wait until other processes have got the states and gradients that were sent to them."""
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
        ctx: Any, states: RecurrentStates, number: int, source: StateLink | None, *given: Tensor
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
        ctx: Any, states: RecurrentStates, number: int, target: StateLink | None, out: Tensor, end: Tensor
    ) -> Tensor:
        ctx.states, ctx.number, ctx.target, ctx.shape = states, number, target, StateShape.of(end)
        ctx.set_materialize_grads(False)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, dout, ctx.states._take_gradient(ctx.number, ctx.target, ctx.shape)
