"""Sends tokens to the ranks that hold their experts, and the results back: all-to-all, with any loads.

Note: [What a recomputation repeats]
Who sends how many tokens to whom follows from the choice of experts, which a recomputation repeats. Plans of exchanges
are therefore no tensors that autograd saves. Nothing is saved after the results have come back, so that a
recomputation ends before that, unless the layer goes on to compute with them.

Note: [Runs of one rank alone]
A rank that gets a layer's first mask, or other arguments that are new to it, tries the layer out, while the other ranks
may have nothing to try. In such runs it sends nothing: its own experts stand in for those of other ranks. That is
enough to see whether the layer repeats its results and computes in slices what it computes as a whole, because each row
still goes by itself to the experts that it has chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_is_alone = ContextVar("_is_alone", default=False)


@contextlib.contextmanager
def exchanging_nothing() -> Iterator[None]:
    """Inside this context, no tokens are sent to other ranks; see Note: [Runs of one rank alone]."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def exchanges() -> bool:
    """Whether tokens are sent to the ranks that hold their experts."""
    return not _is_alone.get()


class TokenExchange:
    """The plan of one exchange. All ranks of the group have to make and use it at the same time.

    The host waits for the device once, for the numbers that follow from the choices of all ranks.

    Args:
        choices: How many experts on each rank of the group each token has chosen, `[tokens, ranks]`.
        group: The ranks.

    Attributes:
        received_choices: How many of the choices of all ranks are experts of this rank.
    """

    def __init__(self, choices: Tensor, group: dist.ProcessGroup) -> None:
        self._group, self._tokens = group, len(choices)
        wanted = choices > 0
        mine = torch.stack([wanted.sum(0), choices.sum(0)], dim=1)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        sent, (received, chosen) = torch.stack([mine, theirs]).transpose(1, 2).tolist()
        self._sent, self._received, self.received_choices = sent[0], received, sum(chosen)
        # Ordered by rank. They stay on the device until the backward, like the choice of experts.
        self._sources = torch.nonzero_static(wanted.t(), size=sum(self._sent))[:, 1].int()

    def send(self, x: Tensor) -> Tensor:
        """Returns the rows `[received, ...]` that other ranks and this one need here, of `x` `[tokens, ...]`."""
        rows: Tensor = _AllToAll.apply(x.index_select(0, self._sources), self._sent, self._received, self._group)
        return rows

    def give_back(self, results: Tensor) -> Tensor:
        """Returns the sum of the results of each token, `[tokens, ...]`, of those of the received rows."""
        total: Tensor = _GiveBack.apply(results, self)
        return total


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.counts
        return _exchange(gradient, received, sent, group), None, None, None


class _GiveBack(torch.autograd.Function):
    """The opposite of sending: an all-to-all, and a sum over the ranks that a token was sent to."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, plan: TokenExchange) -> Tensor:
        ctx.plan = plan
        rows = _exchange(results, plan._received, plan._sent, plan._group)
        return rows.new_zeros(plan._tokens, *rows.shape[1:]).index_add_(0, plan._sources, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan = ctx.plan
        return _exchange(gradient.index_select(0, plan._sources), plan._sent, plan._received, plan._group), None
