"""Proves, without values, that a layer computes each token alike and by itself outside attention.

The layer runs on fake tensors, which have shapes but no values, for two numbers of tokens. A rule for each operator
says whether tokens stay apart, and both runs have to make the same operations with the same numbers. The proof
therefore holds for all weights and all inputs. What cannot be proven is taken for a layer that mixes tokens.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lightning_memo.engine.forward.cut_tokens import token_dim_of
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.layer_output import TokenPlace, split_output
from lightning_memo.engine.forward.python_state import PythonState
from lightning_memo.engine.token_locality.operations_at_length import OperationLog, difference_of, step_of_attention
from lightning_memo.engine.token_locality.stand_ins import (
    LocalFunctions,
    Unusable,
    attend_in_shape,
    attended,
    forward_in_shape,
    refuse,
)
from lightning_memo.engine.token_locality.token_dims import TOKENS, Dim, TokensMixed, holds_tokens
from lightning_memo.engine.token_locality.token_tracker import Step, TokenTracker
from lightning_memo.engine.token_locality.trial_errors import first_line, trial_error
from lightning_memo.engine.token_locality.user_code import has_custom_functions, hooked_module, without_parameter_hooks
from lightning_memo.kernels import AttentionSpec
from lightning_memo.planner.token_slices import Action, TokenRange
from lightning_memo.utils.user_errors import RefusedAtAnyLength

# An attribute: the dotted name of its module, and its own.
Place = tuple[str, str]
_SHORT_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Locality:
    """The result of a proof.

    Attributes:
        why_not: Why a layer may mix tokens outside attention; empty if it is proven that it does not.
        side_places: Where each side value holds the tokens; `None` for one that is the same for all tokens.
        unused: Attributes without which the proof was made.
        operations: The operations of the proof.
        lengths: Numbers of tokens at which the layer is known to make the operations of the proof.
    """

    why_not: str
    side_places: tuple[TokenPlace | None, ...] = ()
    unused: frozenset[Place] = frozenset()
    operations: list[Step] = field(default_factory=list, compare=False)
    lengths: set[int] = field(default_factory=set, compare=False)


@dataclass(frozen=True, slots=True)
class _FakeRun:
    """A run on fake tensors: its operations, and the tokens' places in its side values or the values themselves."""

    steps: list[Step]
    sides: list[object]


def prove_locality(call: LayerCall, x: Tensor, unused: Collection[Place] = ()) -> Locality:
    """Return whether a layer computes each token by itself outside attention.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        unused: Attributes of the layer's modules, by dotted name of the module and name, without which the proof has to
            do.

    Raises:
        ValueError: The layer keeps tensors where a run cannot be undone, saves tensors before they are filled, or is
            refused at any number of tokens.
    """
    name = call.name
    trackers = [TokenTracker(tokens) for tokens in unlike_other_sizes(call, call.tokens, x)]
    try:
        locality = _compared(call, x, trackers, unused)
    except (torch.OutOfMemoryError, RefusedAtAnyLength):
        raise  # the first says nothing of the layer
    except TokensMixed as mixed:
        locality = Locality(f"{name} may not compute each token by itself outside attention: {mixed}")
    except Exception as error:  # whatever a layer raises on tensors without values, it is not proven
        locality = Locality(f"{name} may not compute each token by itself outside attention: {trial_error(error)}")
    if any(step.startswith("aten.rrelu_with_noise") for tracker in trackers for step, _ in tracker.steps):
        raise ValueError(
            f"{name} calls rrelu, which fills a tensor after autograd has saved it, so that it can be neither swapped "
            "nor recomputed: use leaky_relu"
        )
    if any(tracker.outlived() for tracker in trackers):
        raise ValueError(
            f"{name} keeps tensors outside of its modules, arguments and return value (in a global list, for example), "
            "but MemoStrategy runs layers more than once: return them, or keep them in attributes of its modules"
        )
    return locality


def _compared(call: LayerCall, x: Tensor, trackers: Sequence[TokenTracker], unused: Collection[Place]) -> Locality:
    """Run a layer on few and on many tokens.

    Raises:
        TokensMixed: The layer relates tokens to each other, or cannot be shown not to.
    """
    name = call.name
    if hooked := hooked_module(call.layer):
        raise TokensMixed(f"hooks on {hooked} would see the tokens of one slice only")
    short, long = (_run(call, x, tracker, unused) for tracker in trackers)
    if why := difference_of(short.steps, long.steps):
        return Locality(f"{name} computes otherwise with more tokens: {why}")
    if short.sides != long.sides:
        return Locality(f"{name} returns something else with more tokens")
    places = tuple(side if isinstance(side, TokenPlace) else None for side in short.sides)
    operations = _operations_at(call, x, trackers[0].sizes.tokens, unused)
    locality = Locality("", places, frozenset(unused), operations)
    lengths = {call.tokens} if call.layout is None else {call.tokens, call.layout.tokens}
    if why := why_other_at(call, x, lengths, locality):
        return Locality(why)
    locality.lengths.update(lengths)
    return locality


def why_other_at(call: LayerCall, x: Tensor, lengths: Collection[int], proven: Locality) -> str:
    """Return why a layer may compute otherwise at some numbers of tokens than in a proof; empty if it does not.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        lengths: The numbers of tokens.
        proven: The proof.
    """
    try:
        for tokens in sorted(lengths):
            if why := difference_of(proven.operations, _operations_at(call, x, tokens, proven.unused)):
                return f"{call.name} computes otherwise for {tokens} tokens: {why}"
    except Exception as error:  # as in a proof
        return f"{call.name} may compute otherwise for other numbers of tokens: {first_line(error)}"
    return ""


def _operations_at(call: LayerCall, x: Tensor, tokens: int, unused: Collection[Place]) -> list[Step]:
    """Run a layer on fake tensors of some number of tokens, and return its operations."""
    log, fake = OperationLog(), FakeTensorMode(allow_non_fake_inputs=True)

    def make(t: Tensor) -> Tensor:
        n, shape = token_dim_of(t, call.tokens, call.batch, call.token_dim, call.shards), list(t.shape)
        if n is not None:
            shape[n] = shape[n] // call.tokens * tokens
        with fake:
            return torch.empty(shape, dtype=t.dtype, device=t.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        log.steps.append(step_of_attention(spec))
        return attended(q, k, v)

    arguments = tree_map_only(Tensor, make, (call.args, call.kwargs))
    fake_call = replace(call, args=arguments[0], kwargs=arguments[1], tokens=tokens, shards=1, layout=None)
    fake_x = make(x).requires_grad_()
    with running(fake_call, None, fake, unused, attend), fake, log:
        fake_call.run(fake_x.clone(), TokenRange(0, tokens, Action.KEEP))
    return log.steps


def _run(call: LayerCall, x: Tensor, tracker: TokenTracker, unused: Collection[Place]) -> _FakeRun:
    """Run a layer on fake tensors of the tracker's number of tokens.

    Raises:
        TokensMixed: The layer relates tokens to each other, or cannot be shown not to.
    """
    tokens, fake = tracker.sizes.tokens, FakeTensorMode(allow_non_fake_inputs=True)
    make = functools.partial(fake_like, tracker, fake, call)
    arguments = tree_map_only(Tensor, make, (call.args, call.kwargs))
    fake_call = replace(call, args=arguments[0], kwargs=arguments[1], tokens=tokens, shards=1, layout=None)
    everything = TokenRange(0, tokens, Action.KEEP)
    attend = functools.partial(attend_in_shape, tracker, call.shards)
    with running(fake_call, tracker, fake, unused, attend) as functions:
        fake_x = make(x).requires_grad_()
        with fake, tracker:
            output = fake_call.run(fake_x.clone(), everything)  # a layer may change its input in place
        hidden, sides = split_output(output, fake_x, call.layer)
        if tracker.dims(hidden) != tracker.dims(fake_x):
            raise TokensMixed("the hidden states do not hold the tokens of the input")
        places = [_side(value, tracker) for value in sides.values]
        outputs = [t for t in (hidden, *sides.values) if isinstance(t, Tensor) and t.requires_grad]
        if functions.hooked or any(map(has_custom_functions, outputs)):
            with fake, tracker, tracker.backward():
                _check_backward(outputs, fake_x, call.layer, tracker)
        return _FakeRun(tracker.steps, places)


@contextlib.contextmanager
def running(
    call: LayerCall,
    tracker: TokenTracker | None,
    fake: FakeTensorMode,
    unused: Collection[Place],
    attend: Callable[..., Tensor],
) -> Iterator[LocalFunctions]:
    """Inside this context, a layer runs on fake tensors and leaves no trace."""
    with (
        _disable_current_modes(),  # a user's, which count operations, for example
        torch.enable_grad(),
        _without_log(),
        _without_autocast_cache(),
        _prepared(call, tracker, fake, unused),
        handling(attend, on_leaving=refuse),
        call.mode(TokenRange(0, call.tokens, Action.KEEP)),
        without_parameter_hooks(call.layer),
        LocalFunctions(tracker, call.batch, call.token_dim) as functions,
    ):
        yield functions


def _check_backward(outputs: Sequence[Tensor], x: Tensor, layer: nn.Module, tracker: TokenTracker) -> None:
    """Run the backward pass of a layer, and check its gradients.

    Raises:
        TokensMixed: The gradient of the input is not computed token by token, or that of a weight is no sum over them.
    """
    gradients = [tracker.mark(torch.empty_like(t), tracker.dims(t)) for t in outputs]
    weights = [p for p in layer.parameters() if p.requires_grad]
    dx, *of_weights = torch.autograd.grad(outputs, [x, *weights], gradients, allow_unused=True)
    if dx is not None and (tracker.dims(dx) != tracker.dims(x) or tracker.is_sum(dx)):
        raise TokensMixed("the gradient of the input does not hold its tokens")
    for gradient in of_weights:
        if gradient is not None and holds_tokens(tracker.dims(gradient)):
            raise TokensMixed("the gradient of a weight holds tokens")


def _side(value: Any, tracker: TokenTracker) -> object:
    """Return where a side value holds the tokens; if it holds none, its dims or the value itself.

    Raises:
        TokensMixed: It may hold anything.
    """
    if isinstance(value, Tensor):
        dims = tracker.dims(value)
        n = next((n for n, dim in enumerate(dims) if TOKENS in dim), None)
        if n is None:
            return dims
        place = dims[n].index(TOKENS)
        sizes = (tracker.sizes.size(part) for part in (dims[n][:place], dims[n][place + 1 :]))
        return TokenPlace(n, *sizes)
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    raise TokensMixed(f"returns an object of type {type(value).__name__}")


def fake_like(tracker: TokenTracker, fake: FakeTensorMode, call: LayerCall, t: Tensor) -> Tensor:
    """Return a fake tensor in which another number of tokens replaces that of the call."""
    n = token_dim_of(t, call.tokens, call.batch, call.token_dim, call.shards)
    dims: list[Dim] = [tracker.sizes.without_tokens(size) for size in t.shape]
    if n is not None:
        dims[n] = tracker.sizes.of_size(t.shape[n] // call.tokens * tracker.sizes.tokens)
    with fake:
        made = torch.empty([tracker.sizes.size(dim) for dim in dims], dtype=t.dtype, device=t.device)
    return tracker.mark(made, tuple(dims))


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Keep PyTorch from logging that an operation does not run on tensors without values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keep autocast from giving later forwards the fake copies of weights."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _prepared(
    call: LayerCall, tracker: TokenTracker | None, fake: FakeTensorMode, unused: Collection[Place]
) -> Iterator[None]:
    """Give the modules of a layer what fake tensors need, and undo that and what a forward writes.

    Raises:
        TokensMixed: The layer writes to an attribute or to an argument, which slices would do more than once.
    """
    before = PythonState(call.layer, ())
    try:
        for path, name in unused:
            vars(call.layer.get_submodule(path))[name] = Unusable()
        for m in call.layer.modules():
            m._buffers.update({name: None if t is None else fake.from_tensor(t) for name, t in m._buffers.items()})
            if (forward := forward_in_shape(m, tracker)) is not None:
                m.forward = forward
        known = PythonState(call.layer, (call.args, call.kwargs))
        try:
            yield
            if written := known.first_written():
                raise TokensMixed(f"writes to {written}")
        finally:
            known.restore()
    finally:
        before.restore()


def unlike_other_sizes(call: LayerCall, least: int, *others: Tensor) -> tuple[int, int]:
    """Return two primes that divide no size of the layer: a small one, and one that is at least `least`.

    A layer that computes otherwise from some number of tokens on, which slices may not reach, does so for one of them.
    """
    sizes = {size for t in (*others, *call.layer.parameters(), *call.layer.buffers()) for size in t.shape}
    sizes = sizes - {call.tokens} | {sys.maxsize}  # `x[a:]` slices until there

    def from_(least: int) -> int:
        return next(n for n in itertools.count(least) if _is_prime(n) and all(size % n for size in sizes if size))

    short = from_(_SHORT_TOKENS)
    return short, from_(max(least, short + 1))


def _is_prime(n: int) -> bool:
    return all(n % divisor for divisor in range(2, int(n**0.5) + 1))
