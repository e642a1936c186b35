"""Values of tokens whose hidden states several processes have, each of which computes some of the values.

All processes compute the same loss from all values, and the mean over processes is taken of their gradients. The
gradient of a value that a process computes is therefore as many times too large as there are processes: it is the only
one that differentiates it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_memo.parallel.batches.loss_arguments import sum_over_processes
from lightning_memo.parallel.collectives import all_gather_single
from lightning_memo.utils.retained_graph import first_derivative


class Shares:
    """The shares of processes in the tokens: as many tokens for each, in order, and what is left for the last one.

    Args:
        tokens: Number of tokens.
        group: The processes, all of which make the same calls.
    """

    def __init__(self, tokens: int, group: dist.ProcessGroup) -> None:
        self._tokens, self.group = tokens, group
        self._most = -(-tokens // dist.get_world_size(group))
        self._first = self._most * dist.get_rank(group)

    def own(self, t: Tensor) -> Tensor:
        """Return the part `[tokens of this process, ...]` of a tensor `[tokens, ...]`."""
        return t[self._first : self._first + self._most]

    def summed(self, t: Tensor) -> Tensor:
        """Return the sum of a scalar over the processes."""
        return sum_over_processes(t, self.group)

    def gathered(self, t: Tensor) -> Tensor:
        """Return the values of all tokens from those of this process's tokens."""
        gathered: Tensor = _Gathered.apply(t, self)
        return gathered

    def gather(self, own: Tensor) -> Tensor:
        """Return the tokens of all processes, without history."""
        padded = F.pad(own, (0, 0) * (own.dim() - 1) + (0, self._most - own.shape[0])).contiguous()
        whole = padded.new_empty(dist.get_world_size(self.group) * self._most, *own.shape[1:])
        all_gather_single(whole, padded, group=self.group)
        return whole[: self._tokens]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        whole = shares.gather(own)
        if not own.is_floating_point():
            ctx.mark_non_differentiable(whole)
        return whole

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shares.own(gradient) * dist.get_world_size(ctx.shares.group), None
