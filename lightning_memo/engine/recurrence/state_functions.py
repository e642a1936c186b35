"""The functions of transformers in which tokens meet in a state, and how a slice is given the state at its start.

transformers' mixers call these functions by name. Each of them stands for kernels of other packages, if these are
installed, which take the same state arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_memo.parallel.context.state_exchange import StateShape


@dataclass(frozen=True, slots=True)
class StateFunction:
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


_QKV = ("query", "key", "value", "g", "beta")
_DELTA_RULE = StateFunction(_QKV, _QKV, "value", 1, "initial_state", "output_final_state", pairs=True)
_CHANNELS = ("hidden_states", "weight", "bias", "activation")
_SCANNED = ("hidden_states", "dt", "A", "B", "C", "chunk_size")
STATE_FUNCTIONS = {
    "causal_conv1d_fn": StateFunction(_CHANNELS, _CHANNELS[:1], "hidden_states", 2),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": StateFunction(
        _SCANNED, ("hidden_states", "dt", "B", "C"), "hidden_states", 1, "initial_states", "return_final_states"
    ),
}
# Kernels that join several of these functions take no state. If they return None, mixers call the functions.
JOINED_FUNCTIONS = ("mamba2_split_conv1d_scan_combined",)
# Kernels of other packages warn of fewer tokens than heads.
_TRIED_TOKENS = 256
_DOCUMENTS = ("seq_idx", "cu_seqlens")


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
        """What calls have in common whose states are alike: all but the number of tokens, and values."""
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
