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

Note: [States of packed documents]
A call on a packed row is cut where documents start, and computed part after part, so that no kernel has to know
documents. A part gets the state that the part before has reached, without the rows in which a document starts there.
The first part continues the document that the slice before has begun, if it does not start one itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memo.parallel.batches.token_layout import Documents, TokenLayout, has_whole_rows
from lightning_memo.parallel.context_parallel import StateExchange, StateLink, StateShape
from lightning_memo.utils.replaced_functions import replaced
from lightning_memo.utils.state_functions import JOINED_FUNCTIONS, STATE_FUNCTIONS, functions_of

# Kernels of other packages warn of fewer tokens than heads.
_TRIED_TOKENS = 256
_DOCUMENTS = ("seq_idx", "cu_seqlens")


@dataclass(frozen=True, slots=True)
class RunningDocuments:
    """The documents of packed rows, and the place in them of the tokens that run.

    Attributes:
        starts: Positions in each row at which documents start.
        first: Position of the first token that runs. The others follow it.
    """

    starts: Documents
    first: int = 0

    @classmethod
    def of(cls, documents: Documents | None, layout: TokenLayout | None, token: int) -> RunningDocuments | None:
        """Return what a layer call on some tokens needs.

        Args:
            documents: Positions in each row at which documents start; `None` if rows are not packed.
            layout: The layout of the batch; `None` if this process holds all tokens in order.
            token: The first of the tokens, among those of this process.

        Returns:
            The documents; `None` if rows are not packed, or if whole documents are placed, among which no state passes.
        """
        if documents is None or (layout is not None and layout.placement is not None):
            return None
        return cls(documents, token if layout is None else layout.position_of(token))

    def cut(self, rows: int, tokens: int) -> list[tuple[int, int, list[bool]]]:
        """Cut tokens where a document of any row starts.

        Returns:
            The first token and the end of each part, and for each row whether a document starts at the first token.

        Raises:
            ValueError: There are other rows than those of the batch.
        """
        if rows != len(self.starts):
            raise ValueError(
                f"a recurrence got {rows} rows, and the batch has {len(self.starts)} rows of packed documents, so that "
                "it is not known where documents start: pass one document in each row"
            )
        here = [{n - self.first for n in row if 0 <= n - self.first < tokens} for row in self.starts]
        bounds = sorted({0, tokens}.union(*here))
        return [(start, stop, [start in row for row in here]) for start, stop in pairwise(bounds)]


class StateCall:
    """One call of a function that hands a state from token to token.

    Args:
        name: Name of the function.
        function: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        documents: The documents of the rows; `None` if rows are not packed.

    Attributes:
        token_dim: The dimension of tokens in the arguments that hold them, and in the result.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        documents: RunningDocuments | None = None,
    ) -> None:
        self.name = name
        self._rule, self._function = STATE_FUNCTIONS[name], function
        self._args, self._kwargs, self._documents = args, kwargs, documents
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
        few = min(_TRIED_TOKENS, self.like.shape[self.token_dim])
        with saved_tensors_hooks(lambda t: t, lambda t: t):  # nothing of it is stored
            return StateShape.of(self._part(self.by_token[0], 0, few).run()[1])

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
        if self._documents is not None:
            return self._run_documents(first, state, self._documents)
        if not self._rule.start:
            return self._convolve(first, state)
        out, end = self._compute(first, {self._rule.start: state, self._rule.end: True})
        return out, end

    def _run_documents(self, first: Tensor, state: Tensor | None, documents: RunningDocuments) -> tuple[Tensor, Tensor]:
        """Compute the function part after part; see Note: [States of packed documents]."""
        outs = []
        for start, stop, begins in documents.cut(first.shape[0], first.shape[self.token_dim]):
            if start and all(begins):
                state = None
            elif state is not None:
                state = _without(state, begins)
            out, state = self._part(first, start, stop - start).run(state)
            outs.append(out)
        assert state is not None
        return torch.cat(outs, self.token_dim), state

    def _part(self, first: Tensor, start: int, tokens: int) -> StateCall:
        """Return the call on some of the tokens, as those of one document.

        Args:
            first: Takes the place of the first argument that holds tokens.
            start: The first token.
            tokens: Number of tokens.
        """
        names, (leading, *others) = self._rule.names, self._rule.by_token
        whole = {leading: first} | {name: self._argument(name) for name in others}
        part = {name: t.narrow(self.token_dim, start, tokens) for name, t in whole.items()}
        args = tuple(part.get(name, value) for name, value in zip(names, self._args, strict=False))
        kwargs = {name: part.get(name, value) for name, value in self._kwargs.items()}
        return StateCall(self.name, self._function, (*args, *self._args[len(names) :]), kwargs)

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


def _without(state: Tensor, begins: list[bool]) -> Tensor:
    """Return a state with zeros in the rows that begin, which stays in the graph: a process may wait for a gradient."""
    if not any(begins):
        return state
    everywhere = torch.ones((), dtype=torch.bool, device=state.device)
    rows = zip(state.unbind(), begins, strict=True)
    return torch.stack([row.masked_fill(everywhere, 0) if begin else row for row, begin in rows])


@functools.cache
def _parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


# Computes a call on the tokens that it got.
StateHandler = Callable[[StateCall], Tensor]


def may_hand_states(model: nn.Module) -> bool:
    """Return whether some module of a model may call a function that hands a state from token to token."""
    return any(functions_of(type(module)) for module in model.modules())


@contextmanager
def handing(
    layer: nn.Module,
    hand: StateHandler,
    refuse: Callable[[str], None],
    documents: RunningDocuments | None = None,
) -> Iterator[None]:
    """Inside, calls of functions that hand a state from token to token go to `hand`.

    Args:
        layer: The layer that runs.
        hand: Answers the calls.
        refuse: Told why, if the layer calls a function in a way in which no state can be handed.
        documents: The documents of the rows; `None` if rows are not packed.

    Raises:
        ValueError: Rows are packed, and no state can be handed.
    """
    places = {(id(home), name): home for m in layer.modules() for home, name in functions_of(type(m))}
    with ExitStack() as stack:
        for (_, name), home in places.items():
            answer = functools.partial(_answer, name, hand, refuse, documents)
            stack.enter_context(replaced(home, name, answer, chained=False))
        yield


def _answer(
    name: str,
    hand: StateHandler,
    refuse: Callable[[str], None],
    documents: RunningDocuments | None,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Answer a call of a function in a module of transformers whose classes call it by name."""
    if has_whole_rows():
        if documents is None:
            return function(*args, **kwargs)
        hand, documents = compute_alone, replace(documents, first=0)
    if name in JOINED_FUNCTIONS:
        return None
    call = StateCall(name, function, args, kwargs, documents)
    if why := call.why_not():
        if documents is not None:
            raise ValueError(
                f"rows hold several documents, and {why}, so that documents would see each other: pass one document in "
                "each row"
            )
        refuse(why)
        return function(*args, **kwargs)
    return call.returned(hand(call))


def compute_alone(call: StateCall) -> Tensor:
    """Compute a call whose rows begin and end here."""
    return call.run()[0]


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
