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
from dataclasses import dataclass, replace
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

    def rows(self, rows: int) -> int:
        """Return the number of rows of whole tensors, from that of tensors of this process's tokens."""
        return self.layout.rows_of_batch(rows)

    def whole(self, t: Tensor, dim: int) -> Tensor:
        """Return the tokens of all processes in their order, from a tensor whose dimension `dim` has this process's.

        Padding that no process has is 0.
        """
        if not t.is_floating_point():
            return self._gather(t, dim)
        gathered: Tensor = _Gather.apply(t, dim, self)
        return gathered

    def own(self, t: Tensor, dim: int) -> Tensor:
        """Return this process's tokens, in its order, from a tensor whose dimension `dim` has all; padding is 0."""
        tokens = self._tokens_first(t, dim).index_select(0, _places(self.layout).own.to(t.device))
        return self._of_process(tokens, dim).contiguous()

    def _gather(self, t: Tensor, dim: int) -> Tensor:
        if self._joins_rows and (dim == 0 or t.shape[0] != 1):
            raise ValueError(
                f"a tensor {list(t.shape)} has no rows, whose documents processes have whole: set "
                "context_parallel_size=1, or give rows of one length"
            )
        sent = t.movedim(dim, 0).contiguous()
        bits = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
        received = bits.new_empty((self.layout.tokens, *bits.shape[1:]))
        all_gather_single(received, bits, group=self._group)
        order = _places(self.layout).order.to(t.device)
        if self.layout.placement is not None:
            received = _with_padding(received, 1)
        whole = received.view(sent.dtype).index_select(0, order)
        if not self._joins_rows:
            return whole.movedim(0, dim).contiguous()
        return whole.unflatten(0, (-1, self.tokens)).squeeze(2).movedim(1, dim).contiguous()

    def _scatter(self, gradient: Tensor, dim: int) -> Tensor:
        """Return the gradient of this process's tokens: the sum over the processes, in fp32 for half precision."""
        sent = self._tokens_first(gradient, dim).index_select(0, _places(self.layout).all.to(gradient.device))
        received = torch.empty_like(sent)  # a reduction in fp32 would send, and hold, twice as much
        dist.all_to_all_single(received, sent, group=self._group)
        parts = received.unflatten(0, (-1, self.layout.local_tokens))
        return self._of_process(parts.sum(0, dtype=sums_dtype(gradient)), dim).to(gradient.dtype)

    @property
    def _joins_rows(self) -> bool:
        """Whether the documents of several rows are in one row of each process."""
        return self.layout.rows_of_batch(1) > 1

    def _tokens_first(self, whole: Tensor, dim: int) -> Tensor:
        """Return the tokens of all rows in the first dimension, with padding behind them."""
        if not self._joins_rows:
            tokens = whole.movedim(dim, 0)
        else:
            tokens = whole.expand(self.rows(1), *whole.shape[1:]).movedim(dim, 1).flatten(0, 1)
        missing = self.layout.tokens - len(tokens) if self.layout.placement is None else 1
        return _with_padding(tokens, missing)

    def _of_process(self, tokens: Tensor, dim: int) -> Tensor:
        """Return tokens of this process with its rows before them, from a tensor with the tokens first."""
        return tokens.unsqueeze(1).movedim(0, dim) if self._joins_rows else tokens.movedim(0, dim)


def _with_padding(tokens: Tensor, count: int) -> Tensor:
    return F.pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, count)) if count else tokens


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, dim: int, tokens: GatheredTokens) -> Tensor:
        ctx.dim, ctx.tokens = dim, tokens
        return tokens._gather(t, dim)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tokens._scatter(gradient, ctx.dim), None, None


@dataclass(frozen=True, slots=True)
class _Places:
    """Where tokens are, int64.

    Attributes:
        own: This process's tokens among those of all rows. Padding follows all tokens.
        all: The same of all processes, one after the other.
        order: Where all tokens of the rows are among those of `all`; behind them if no process has them.
    """

    own: Tensor
    all: Tensor
    order: Tensor


@functools.lru_cache(maxsize=8)  # every layer of a batch asks for the same
def _places(layout: TokenLayout) -> _Places:
    ranks = [(ring, ulysses) for ring in range(layout.ring) for ulysses in range(layout.ulysses)]
    layouts = [replace(layout, ring_rank=ring, ulysses_rank=ulysses) for ring, ulysses in ranks]
    own, places = layout.layer_order(), torch.cat([each.layer_order() for each in layouts])
    if layout.placement is None:
        return _Places(own, places, places.argsort()[: layout.row_tokens])
    sources, count = layout.placement.sources(), layout.placement.rows * layout.row_tokens
    sources = torch.where(sources < 0, count, sources)
    order = torch.full((count + 1,), layout.tokens)
    order[sources[places]] = torch.arange(layout.tokens)
    return _Places(sources[own], sources[places], order[:count])
