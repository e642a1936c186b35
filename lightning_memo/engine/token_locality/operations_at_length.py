"""The operations of a layer at a given number of tokens.

A proof is made for two numbers of tokens that no other size of the layer equals. A layer that takes another way for
some numbers only, for example for multiples of 4, is found by running it at the numbers at which it is going to run.
There, sizes do not tell tokens from anything else, so operations are compared with those of the proof by their names
and by the numbers that are no sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_memo.engine.recurrence.state_functions import StateCall
from lightning_memo.engine.token_locality.token_tracker import SIZED, Step, asked_device, is_whole_slice
from lightning_memo.kernels import AttentionSpec
from lightning_memo.utils.operator_values import tensors_in, values_in


class OperationLog(TorchDispatchMode):
    """Notes the operations that run inside this context.

    Attributes:
        steps: The operations, with the numbers that they were given and that are no sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._answering = False

    @contextlib.contextmanager
    def answering(self, step: Step) -> Iterator[None]:
        """Note a step in place of the operations that run inside this context."""
        self.steps.append(step)
        before, self._answering = self._answering, True
        try:
            yield
        finally:
            self._answering = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass(t) for t in tensors_in(args, kwargs)):
            return NotImplemented  # their class takes them apart
        if not (self._answering or func.namespace == "prim" or _leaves_all_as_it_is(func, args)):
            self.steps.append((str(func), tuple(_numbers(func, (args, kwargs)))))
        return func(*args, **kwargs)


def _leaves_all_as_it_is(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation computes nothing and cuts no gradient.

    PyTorch detaches a new tensor if anything refers to it, for example in `torch.ones`, and what follows tokens does.
    """
    return is_whole_slice(func, args) or (func is torch.ops.aten.detach.default and not args[0].requires_grad)


def _numbers(func: Any, arguments: Any) -> Iterator[object]:
    kinds = (bool, float, complex) if func.overloadpacket in SIZED else (bool, int, float, complex)
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
    """Return what differs between the operations at two numbers of tokens; empty if nothing does."""
    for a, b in zip(first, second, strict=False):
        if a[0] != b[0]:
            return f"{a[0]} is called for some lengths only"
        if a != b:
            return f"{a[0]} is called with numbers that depend on the length"
    if len(first) != len(second):
        longer = max(first, second, key=len)
        return f"{longer[min(len(first), len(second))][0]} is called for some lengths only"
    return ""
