"""The recipe of lazy logits: the head, its input, and the functions to apply to its output."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_memo.engine.memory.saved_storages import NotedTensor, byte_sums
from lightning_memo.engine.modules.token_local_modules import Forward, TokenLocal, chunk_tokens_of, chunks
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts
from lightning_memo.engine.state.forward_state import ForwardState
from lightning_memo.loss.chunked_logits import (
    ChunkedLogits,
    OfTokens,
    Pointwise,
    chunked_cross_entropy,
    gradients_of_logits,
    token_values,
)
from lightning_memo.loss.shared_tokens import Shares
from lightning_memo.parallel.tensor.sharded_logits import replicated
from lightning_memo.utils.around_forward import without_saved_tensors_hooks

_COPIES = 4
_CHANGE = (
    "was changed since the forward whose logits are used now, and logits of long sequences are computed when they are "
    "used: keep what you need of them before the optimizer step, for example logits.detach().clone(), or set "
    "loss_chunk_tokens=None"
)
_HIDDEN_CHANGE = (
    "hidden states were changed in place after the forward, and logits of long sequences are computed from them when "
    "they are used: change a copy of the hidden states (clone()), or set loss_chunk_tokens=None"
)


@dataclass(eq=False, slots=True)
class Head:
    """A model's output head with lazy logits.

    Attributes:
        module: The head.
        forward: The head's own forward.
        chunk_tokens: Number of this process's tokens whose logits exist at the same time.
        shards: Number of sequence-parallel ranks, each with its own part of the tokens of every row.
        parts: Number of processes that share the logits of a token; if more than one, the logits are a `DTensor`.
        sharers: The processes that have the same hidden states, and compute values of some of the tokens each; `None`
            if there are no others.
    """

    module: nn.Module
    forward: Forward
    chunk_tokens: int
    shards: int = 1
    parts: int = 1
    sharers: dist.ProcessGroup | None = None

    @property
    def is_whole(self) -> bool:
        """Whether this process computes all logits of each token."""
        return self.shards == 1 and self.parts == 1

    def replicated(self, t: Tensor) -> Tensor:
        """Convert a result that is equal on all processes that share the logits to the tensor type of the logits."""
        if self.parts == 1:
            return t
        mesh = next(p.device_mesh for p in self.module.parameters() if isinstance(p, DTensor))
        return replicated(t, mesh)


class HeadState(ForwardState):
    """What the head reads, with the graphs of its weights, which logits of the same step need.

    Weights that are written through `data`, as averages of weights are swapped in, count no versions. Their values are
    compared if autograd does not track the logits, because such logits are often used later.

    Args:
        head: The head.
        tracked: Whether autograd tracks the logits.
    """

    def __init__(self, head: nn.Module, tracked: bool) -> None:
        super().__init__(head, (), change=_CHANGE, copies=False)
        self._weights = [] if tracked else [(p, _sums_of(p)) for p in head.parameters()]

    def _drop_graphs(self) -> None:
        """Keep the graphs."""

    def check(self) -> None:
        """Check the values of weights that autograd does not track.

        Raises:
            RuntimeError: They are others.
        """
        for p, before in self._weights:
            if not torch.equal(_sums_of(p), before):
                raise RuntimeError(f"a weight ({self._name}) {_CHANGE}")


def _sums_of(t: Tensor) -> Tensor:
    return torch.cat([byte_sums(part) for part in plain_parts(t)])


@dataclass(frozen=True, slots=True)
class Recipe:
    """The computation of logits: `pointwise(head(x))`, with the shape `[*leading, vocabulary]`.

    Attributes:
        head: The output head.
        hidden: Hidden states `[..., hidden]`; with several shards `[rows, tokens of this shard, hidden]`.
        leading: Dimensions of the logits in front of the vocabulary.
        pointwise: Functions to apply to the output of the head.
        tracked: Whether autograd tracks the logits.
        state: What the head read when the hidden states were computed.
        autocast: Restores the autocast state of that time.
    """

    head: Head
    hidden: NotedTensor
    leading: tuple[int, ...]
    pointwise: tuple[Pointwise, ...]
    tracked: bool
    state: HeadState
    autocast: Callable[[], AbstractContextManager[Any]]

    @property
    def x(self) -> Tensor:
        """The hidden states.

        Raises:
            RuntimeError: They were changed in place since.
        """
        self.hidden.check(_HIDDEN_CHANGE)
        return self.hidden.tensor

    def of(self, x: Tensor) -> Recipe:
        """Return the recipe of the same logits of some of the tokens, or with another history of the hidden states."""
        return replace(self, hidden=NotedTensor.of(x))

    @property
    def trained(self) -> list[Tensor]:
        """The parameters of the head that get gradients through the logits."""
        return [p for p in self.head.module.parameters() if p.requires_grad] if self.tracked else []

    def compute(self) -> Tensor:
        """Compute the real logits."""
        self.state.check()
        with torch.set_grad_enabled(self.tracked), self.autocast(), without_saved_tensors_hooks():
            with self.state.replayed():
                logits = self.head.forward(self.x)
            return self._finished(logits)

    def _finished(self, logits: Tensor) -> Tensor:
        for function in self.pointwise:
            logits = function(logits)
        shape = (*self.leading, logits.shape[-1])
        return logits if logits.shape == shape else logits.reshape(shape)

    def gradients(self, gradient: Tensor, of_x: bool) -> list[Tensor | None]:
        """Return the gradients of the hidden states (`None` unless `of_x`) and of `trained` by that of the logits."""
        logits, dtypes = self.in_chunks(), [p.dtype for p in self.trained]
        if self.head.is_whole:
            dx, sums = gradients_of_logits(logits, self.x, gradient, of_x)
            return [dx, *sums.take(dtypes)]
        x = self.x.detach().requires_grad_(of_x)
        with torch.enable_grad(), self.autocast():
            y = self._finished(logits.head(x))
        with torch._C.DisableTorchFunctionSubclass():  # divided logits give functions the whole vocabulary
            dx, found = logits.head.gradients(y, x, gradient)
        return [dx, *found]

    def tokens_first(self) -> Tensor:
        """Return the hidden states with the shape `[*leading, hidden]`; for a single shard."""
        return self.x.reshape(*self.leading, self.x.shape[-1])

    def in_chunks(self) -> ChunkedLogits:
        """Return the computation of the same logits in chunks."""
        self.state.check()
        with self.autocast(), self.state.replayed():
            local = TokenLocal(self.head.module, self.head.forward, self.state)
        tokens = chunk_tokens_of(self.x, self.head.chunk_tokens)
        return ChunkedLogits(local, self.pointwise, tokens, self.head.shards)

    def argmax(self) -> Tensor:
        """Return the token id of the largest logit, `[*leading]`; for a single shard."""
        logits, found = self.in_chunks(), []
        with torch.no_grad():
            for part in chunks(self.x, logits.chunk_tokens):
                z = logits.head(part)
                for function in logits.pointwise:
                    z = function(z)
                found.append((z.full_tensor() if isinstance(z, DTensor) else z).argmax(-1))
        return torch.cat(found, 1).view(self.leading)

    def values(self, values_of: OfTokens, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return values of each token; for a single shard, and a process that has all of the vocabulary.

        Args:
            values_of: Computes the values of some tokens.
            arguments: Further arguments `[*leading, ...]`.
        """
        logits = self.in_chunks()
        # Functions of all logits of a token, and their gradients, need some copies of a chunk.
        logits = replace(logits, chunk_tokens=max(1, logits.chunk_tokens // _COPIES))
        dims = len(self.leading)
        flat = [t.flatten(0, dims - 1) for t in arguments]
        if (shares := self.shares()) is None:
            found = token_values(logits, self.x, values_of, flat)
        else:
            x, *flat = (shares.own(t) for t in (self.x.flatten(0, -2), *flat))
            found = tuple(map(shares.gathered, token_values(logits, x, values_of, flat)))
        return tuple(t.reshape(*self.leading, *t.shape[1:]) for t in found)

    def cross_entropy(self, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
        """Return the cross-entropy of the tokens, as :func:`chunked_cross_entropy` does."""
        logits = self.in_chunks()
        if (shares := self.shares()) is None:
            return chunked_cross_entropy(logits, self.x, target, ignore_index, reduction)
        x = shares.own(self.x.flatten(0, -2))
        total = shares.summed(chunked_cross_entropy(logits, x, shares.own(target), ignore_index, "sum"))
        return total if reduction == "sum" else total / (target != ignore_index).sum()

    def shares(self) -> Shares | None:
        """Return the shares of processes in the tokens; `None` if each computes all of them.

        Values that need no gradients may be those of one process only, which logs them, for example.
        """
        group, tokens = self.head.sharers, math.prod(self.leading)
        tracked = self.tracked and torch.is_grad_enabled() and bool(self.x.requires_grad or self.trained)
        if group is None or not tracked or tokens < dist.get_world_size(group) ** 2:  # each has some of more tokens
            return None
        return Shares(tokens, group)

    def joined(self, other: Recipe, function: Callable[[Tensor, Tensor], Tensor]) -> Recipe | None:
        """Return the recipe of a function of these logits and of others; `None` if another call of the head made them.

        Between two calls of a head, its weights, adapters and autocast may have changed.
        """
        same_call = self.state is other.state and self.autocast is other.autocast
        if not same_call or (self.leading, self.tracked) != (other.leading, other.tracked) or self.x is not other.x:
            return None
        chains = self.pointwise, other.pointwise

        def of_both(z: Tensor) -> Tensor:
            first, second = (functools.reduce(lambda t, f: f(t), chain, z) for chain in chains)
            return function(first, second)

        return replace(self, pointwise=(of_both,))


def leaves_vocabulary(index: Any, dims: int) -> bool:
    """Return whether an index keeps the complete vocabulary as the last dimension of logits with `dims` dimensions."""
    parts = parts_of(index)
    if not all(part is None or part is ... or type(part) in (int, slice, Tensor) for part in parts):
        return False
    used, last = sum(_dims_used(part) for part in parts), parts[-1]
    reaches = used == dims or (last is not ... and any(part is ... for part in parts))
    return used <= dims and (not reaches or (isinstance(last, slice) and last == slice(None)))


def parts_of(index: Any) -> tuple[Any, ...]:
    """Return what an index says of each dimension."""
    return index if isinstance(index, tuple) else (index,)


def _dims_used(part: Any) -> int:
    if part is None or part is ...:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1
