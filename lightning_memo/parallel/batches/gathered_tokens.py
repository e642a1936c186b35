"""The tokens of all context-parallel processes on each of them.

Note: [Gathered tokens]
A module that relates tokens in a way that nothing divides (a mixer without a state function, attention that the model
computes itself, position biases) gets the tokens of all processes in their order, without padding, computes all of
them, and keeps the outputs of this process's tokens. Every process computes the same. The gradient of an output is
zero outside of the process's own tokens, so that each process has its share of the gradients of weights, and the
gradients of inputs are added over the processes.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_memo.kernels.attention_kernel import sums_dtype
from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.parallel.collectives import all_gather_single
from lightning_memo.utils.retained_graph import first_derivative


class GatheredTokens:
    """Gathers the tokens of all context-parallel processes, and takes those of this process.

    Args:
        layout: Where the tokens of the batch are.
        group: The processes, in the order of their context-parallel ranks.
    """

    def __init__(self, layout: TokenLayout, group: dist.ProcessGroup) -> None:
        self.layout, self._group = layout, group

    @property
    def tokens(self) -> int:
        """Number of tokens of a row, without padding."""
        return self.layout.row_tokens

    def whole(self, t: Tensor, dim: int) -> Tensor:
        """Return the tokens of all processes in their order, from a tensor whose dimension `dim` has this process's."""
        if not t.is_floating_point():
            return self._gather(t, dim)
        gathered: Tensor = _Gather.apply(t, dim, self)
        return gathered

    def own(self, t: Tensor, dim: int) -> Tensor:
        """Return this process's tokens, in its order, from a tensor whose dimension `dim` has all; padding is 0."""
        own = _places(self.layout)[0].to(t.device)
        return self._padded(t, dim).index_select(dim, own)

    def _padded(self, t: Tensor, dim: int) -> Tensor:
        missing = self.layout.tokens - t.shape[dim]
        return F.pad(t, (0, 0) * (t.dim() - 1 - dim) + (0, missing)) if missing else t

    def _gather(self, t: Tensor, dim: int) -> Tensor:
        sent = t.movedim(dim, 0).contiguous()
        bits = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
        received = bits.new_empty((self.layout.tokens, *bits.shape[1:]))
        all_gather_single(received, bits, group=self._group)
        order = _places(self.layout)[2][: self.tokens].to(t.device)
        return received.view(sent.dtype).index_select(0, order).movedim(0, dim).contiguous()

    def _scatter(self, gradient: Tensor, dim: int) -> Tensor:
        """Return the gradient of this process's tokens: the sum over the processes, in fp32 for half precision."""
        places = _places(self.layout)[1].to(gradient.device)
        sent = self._padded(gradient, dim).movedim(dim, 0).index_select(0, places)
        received = torch.empty_like(sent)  # a reduction in fp32 would send, and hold, twice as much
        dist.all_to_all_single(received, sent, group=self._group)
        parts = received.unflatten(0, (-1, self.layout.local_tokens))
        return parts.sum(0, dtype=sums_dtype(gradient)).movedim(0, dim).to(gradient.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, dim: int, tokens: GatheredTokens) -> Tensor:
        ctx.dim, ctx.tokens = dim, tokens
        return tokens._gather(t, dim)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tokens._scatter(gradient, ctx.dim), None, None


@functools.lru_cache(maxsize=8)  # every layer of a batch asks for the same
def _places(layout: TokenLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of this process's tokens, those of all processes one after the other, and their order."""
    ranks = [(ring, ulysses) for ring in range(layout.ring) for ulysses in range(layout.ulysses)]
    layouts = [replace(layout, ring_rank=ring, ulysses_rank=ulysses) for ring, ulysses in ranks]
    places = torch.cat([each.layer_order() for each in layouts])
    return layout.layer_order(), places, places.argsort()
