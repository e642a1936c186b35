"""Follows the tokens through the operations of a layer that runs on fake tensors, and notes these operations.

A proof is made for two numbers of tokens that no other size of the layer equals. A layer that takes another way for
some numbers only, for example for multiples of 4, is found by running it at the numbers at which it is going to run.
There, sizes do not tell tokens from anything else, so operations are compared with those of the proof by their names
and by the numbers that are no sizes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_memo.engine.recurrence import StateCall
from lightning_memo.engine.token_locality.operator_rules import (
    TOKENS,
    Dims,
    Operation,
    TokenSizes,
    TokensMixed,
    dims_of_sum,
    holds_tokens,
    rule_of,
    stays_a_sum,
    sums_tokens,
)
from lightning_memo.kernels import AttentionSpec
from lightning_memo.utils.operator_values import tensors_in, values_in

_aten = torch.ops.aten
# Operators whose results hold the same value everywhere.
_CONSTANTS = (
    _aten.zeros,
    _aten.ones,
    _aten.full,
    _aten.empty,
    _aten.new_zeros,
    _aten.new_ones,
    _aten.new_full,
    _aten.new_empty,
)
# Operators whose integers are sizes and ranges. The shapes of their results show whether they keep tokens apart.
_SIZED = (
    *_CONSTANTS,
    _aten.view,
    _aten._unsafe_view,
    _aten.expand,
    _aten.repeat,
    _aten.slice,
    _aten.split,
    _aten.split_with_sizes,
)
_FILLS = {_aten.full: 1, _aten.new_full: 2}  # the place of the argument that is a value and no size
Step = tuple[str, tuple[object, ...]]


class Whereabouts:
    """Knows which module of a layer runs.

    Attributes:
        path: Dotted name of the innermost module that runs; empty for the layer itself.
        failed: That of the module in which a proof has failed; `None` if none has.
    """

    def __init__(self) -> None:
        self.path = ""
        self.failed: str | None = None

    def noting(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a module, which notes when it runs."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.path = self.path, path
            try:
                return forward(*args, **kwargs)
            except Exception:
                self.note_failure()
                raise
            finally:
                self.path = before

        return run

    def note_failure(self) -> None:
        """Note that the proof has failed in the module that runs, unless it has failed before."""
        self.failed = self.path if self.failed is None else self.failed


class OperationLog(TorchDispatchMode):
    """Notes the operations that run inside this context, at any number of tokens.

    Attributes:
        operations: The operations, with the numbers that they were given and that are no sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Step] = []
        self._notes = True

    def noting(self, step_of: Callable[[Any], Step], answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that notes a step in place of the operations by which it answers a call.

        Args:
            step_of: Returns the step that stands for the call, from the last argument of the call.
            answer: Answers the call.
        """

        def noted(*call: Any) -> Tensor:
            self.operations.append(step_of(call[-1]))
            with self._unnoted():
                return answer(*call)

        return noted

    @contextlib.contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Inside this context, a module runs on the tokens of all processes."""
        with self._unnoted():
            yield

    @contextlib.contextmanager
    def _unnoted(self) -> Iterator[None]:
        """Inside this context, operations are not noted, because a call or an operation was noted in their place."""
        before, self._notes = self._notes, False
        try:
            yield
        finally:
            self._notes = before

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._notes and not _leaves_all_as_it_is(func, args):
            self.operations.append((str(func), tuple(_numbers(func, (args, kwargs)))))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := _asked_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass(t) for t in tensors_in(args, kwargs)):
            return NotImplemented  # their class takes them apart
        if func.namespace != "prim":
            self._note(func, args, kwargs)
        return func(*args, **kwargs)


class TokenTracker(OperationLog):
    """Also knows the dims of every tensor that depends on tokens; see Note: [Token dims].

    Args:
        tokens: Number of tokens: a prime that divides no other size of the layer.

    Attributes:
        sizes: Sizes of dims.
        steps: The operations and those of their decompositions, with all numbers that they were given. They do not
            depend on the number of tokens if a layer computes every token alike.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.sizes = TokenSizes(tokens)
        self.steps: list[Step] = []
        self._dims: dict[int, Dims] = {}
        self._sums: set[int] = set()
        self._in_backward = False
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of one whose dims are known

    def mark(self, t: Tensor, dims: Dims) -> Tensor:
        """Note where a tensor holds tokens, and return it."""
        self._dims[id(t)] = dims
        self._alive.append(t)
        return t

    def refuse(self, why: str) -> None:
        """End the proof.

        Raises:
            TokensMixed: Always.
        """
        raise TokensMixed(why)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Inside this context, operations may add up all tokens, as the gradients of weights do."""
        self._in_backward = True
        try:
            with self._unnoted():  # at other numbers of tokens, a layer runs forward only
                yield
        finally:
            self._in_backward = False

    def dims(self, t: Tensor) -> Dims:
        """Return where a tensor holds tokens.

        Raises:
            TokensMixed: The tensor was made by the number of tokens.
        """
        known = self._dims.get(id(t))
        if known is not None:
            return known
        if any(map(self.sizes.holds_tokens, t.shape)):
            raise TokensMixed("the layer makes a tensor by the number of tokens")
        return tuple(map(self.sizes.without_tokens, t.shape))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (device := _asked_device(func, args)) is not None:
            return device
        if func.namespace == "prim":
            return func(*args, **kwargs)
        given = tensors_in(args, kwargs)
        if any(is_traceable_wrapper_subclass(t) for t in given):
            return NotImplemented  # their class takes them apart
        self._note(func, args, kwargs)
        if not _is_whole_slice(func, args):
            self.steps.append((str(func), tuple(self._numbers(func, (args, kwargs)))))
        if any(id(t) in self._sums for t in given):
            return self._on_sums(func, args, kwargs, given)
        if not any(holds_tokens(self.dims(t)) for t in given):
            return self._without_tokens(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TokensMixed(f"{func.overloadpacket} draws random numbers for each token")
        rule = rule_of(func)
        if rule is None:
            return self._decomposed(func, args, kwargs)
        result = func(*args, **kwargs)
        operation = Operation(func, args, kwargs, result, self.dims, self.sizes)
        if self._in_backward and sums_tokens(operation):
            self._sums.add(id(self.mark(result, dims_of_sum(operation))))
        else:
            self._mark_outputs(func, given, result, rule(operation))
        return result

    def _on_sums(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
        """Run an operation of which some argument is a sum over tokens."""
        sums = [id(t) in self._sums for t in given]
        if not stays_a_sum(func, sums, [self.dims(t) for t in given]):
            if func._can_decompose():
                with self._unnoted(), self:
                    return func.decompose(*args, **kwargs)
            raise TokensMixed(f"{func.overloadpacket} computes with a sum over tokens")
        result = func(*args, **kwargs)
        operation = Operation(func, args, kwargs, result, self.dims, self.sizes)
        self._sums.add(id(self.mark(result, dims_of_sum(operation))))
        return result

    def is_sum(self, t: Tensor) -> bool:
        """Return whether a tensor is a sum over tokens."""
        return id(t) in self._sums

    def _without_tokens(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of which no argument holds tokens. The result may hold the same value for each token."""
        result = func(*args, **kwargs)
        for t in tensors_in(result):
            if any(map(self.sizes.holds_tokens, t.shape)):
                if func.overloadpacket not in _CONSTANTS and not self._repeats(func, args, t):
                    raise TokensMixed(f"{func.overloadpacket} makes a tensor by the number of tokens")
                self.mark(t, tuple(map(self.sizes.of_size, t.shape)))
        return result

    def _repeats(self, func: Any, args: tuple[Any, ...], result: Tensor) -> bool:
        """Return whether a result has as many equal entries as there are tokens."""
        if func.overloadpacket is not _aten.expand:
            return False
        sizes = (1,) * (result.dim() - args[0].dim()) + tuple(args[0].shape)
        return all(before == 1 or before == after for before, after in zip(sizes, result.shape, strict=True))

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._unnoted(), self:
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            simpler = torch._decomp.decomposition_table.get(func)
            if simpler is not None:
                return simpler(*args, **kwargs)
        raise TokensMixed(f"calls {func.overloadpacket}, of which it is not known whether it relates tokens")

    def _mark_outputs(self, func: Any, given: Sequence[Tensor], result: Any, dims: Dims | list[Dims]) -> None:
        outs = tensors_in(result)
        for t, of_t in zip(outs, dims if isinstance(dims, list) else [dims] * len(outs), strict=True):
            assert tuple(map(self.sizes.size, of_t)) == tuple(t.shape), (func, of_t, t.shape)
            if any(t is other for other in given) and self.dims(t) != of_t:
                raise TokensMixed(f"{func.overloadpacket} writes tokens into a tensor of something else")
            self.mark(t, of_t)

    def _numbers(self, func: Any, arguments: Any) -> Iterator[object]:
        """Return the numbers among arguments; sizes as multiples of the number of tokens."""
        if func.overloadpacket is _aten.slice and len(arguments[0]) > 3 and arguments[0][3] is not None:
            t, dim, start, stop, *step = arguments[0]
            arguments = (t, dim, start, min(stop, t.shape[dim]), *step)  # what is beyond the end may be any number
        sized = func.overloadpacket in _SIZED
        fill = arguments[0][_FILLS[func.overloadpacket]] if func.overloadpacket in _FILLS else None
        for value in values_in(arguments):
            if isinstance(value, int) and sized and value is not fill and self.sizes.holds_tokens(abs(value)):
                yield TOKENS, value // self.sizes.tokens
            elif isinstance(value, (bool, int, float, complex, torch.dtype)):
                yield value
            elif isinstance(value, FakeTensor) and value.constant is not None:  # made of numbers, by `torch.tensor`
                yield tuple(value.constant.flatten().tolist())


class ForwardTracker(TokenTracker):
    """Follows the tokens until they are mixed, and lets the forward run on, because more is to be seen of it.

    Args:
        tokens: As for :class:`TokenTracker`.
        whereabouts: Knows which module runs.

    Attributes:
        why_mixed: Why tokens may be mixed; empty as long as they are not.
    """

    def __init__(self, tokens: int, whereabouts: Whereabouts) -> None:
        super().__init__(tokens)
        self.why_mixed = ""
        self._whereabouts, self._follows = whereabouts, True

    def refuse(self, why: str) -> None:
        """Note that tokens may be mixed."""
        if self._follows and not self.why_mixed:
            self.why_mixed = why
            self._whereabouts.note_failure()

    @contextlib.contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Inside this context, a module runs on the tokens of all processes, and relates them."""
        before, self._follows = self._follows, False
        try:
            with self._unnoted():
                yield
        finally:
            self._follows = before

    def dims(self, t: Tensor) -> Dims:
        return super().dims(t) if self._follows and not self.why_mixed else ((),) * t.dim()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._follows and not self.why_mixed:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except TokensMixed as mixed:
                self.refuse(str(mixed))
        return func(*args, **(kwargs or {}))


def _leaves_all_as_it_is(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation computes nothing and cuts no gradient.

    PyTorch detaches a new tensor if anything refers to it, for example in `torch.ones`, and what follows tokens does.
    """
    return _is_whole_slice(func, args) or (func is torch.ops.aten.detach.default and not args[0].requires_grad)


def _is_whole_slice(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation is a slice that leaves out nothing. DTensors make some, from 257 tokens on."""
    if func.overloadpacket is not _aten.slice:
        return False
    t, dim, start, stop, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    return not start and (stop is None or stop >= t.shape[dim]) and step == 1


def _asked_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """Return the device of a fake tensor if an operator asks for it; `None` for all other operators.

    Autograd asks for that of each tensor. All modes pass the question on, which takes as long as an operation.
    """
    asks = func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
    return args[0].fake_device if asks else None


def _numbers(func: Any, arguments: Any) -> Iterator[object]:
    kinds = (bool, float, complex) if func.overloadpacket in _SIZED else (bool, int, float, complex)
    for value in values_in(arguments):
        if isinstance(value, (*kinds, torch.dtype)):
            yield value


def step_of_attention(spec: AttentionSpec) -> Step:
    """Return the step that stands for an attention call. Windows and masks belong to the batch."""
    return "attention", (spec.causal, spec.scale, spec.dropout, spec.softcap)


def step_of_recurrence(call: StateCall) -> Step:
    """Return the step that stands for a call of a function that hands a state from token to token."""
    return call.name, tuple(value for value in call.arguments if isinstance(value, (bool, int, float, str, tuple)))


def difference_of(first: list[Step], second: list[Step]) -> str:
    """Return the first difference between the operations at two numbers of tokens; empty if there is none."""
    for a, b in zip(first, second, strict=False):
        if a[0] != b[0]:
            return f"{a[0]} is called for some lengths only"
        if a != b:
            return f"{a[0]} is called with numbers that depend on the length"
    if len(first) != len(second):
        longer = max(first, second, key=len)
        return f"{longer[min(len(first), len(second))][0]} is called for some lengths only"
    return ""
