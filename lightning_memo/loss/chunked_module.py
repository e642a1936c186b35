"""Runs a module that treats each token by itself on chunks of tokens, and keeps nothing but its input for backward.

A norm after the last layer otherwise keeps copies of the whole sequence, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_memo.engine.layer_forward import replace_forward
from lightning_memo.engine.sharded import awaited
from lightning_memo.loss.token_local import Forward, GradientSums, TokenLocal, chunks


def attach_chunks(module: nn.Module, chunk_tokens: int) -> Callable[[], None]:
    """Make a module run on `chunk_tokens` tokens at a time where it is given more; returns what undoes it.

    Args:
        module: Treats each token by itself: `[..., hidden]` to `[..., hidden]`.
        chunk_tokens: Tokens, of all sequences of a batch together.
    """

    def run(module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or args[0].shape[:-1].numel() <= chunk_tokens:
            return forward(*args, **kwargs)
        return run_in_chunks(module, forward, args[0], chunk_tokens)

    return replace_forward(module, run)


def run_in_chunks(module: nn.Module, forward: Forward, x: Tensor, chunk_tokens: int) -> Tensor:
    """What a module makes of `x` `[..., hidden]`, without a graph; backward computes each chunk again."""
    local = TokenLocal(module, forward)
    result: Tensor = _InChunks.apply(local, chunk_tokens, awaited(x), *local.trained)
    return result


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: TokenLocal, chunk_tokens: int, x: Tensor, *trained: Tensor) -> Tensor:
        ctx.module, ctx.chunk_tokens, ctx.dtypes = module, chunk_tokens, [p.dtype for p in trained]
        ctx.save_for_backward(x)
        parts = chunks(x, chunk_tokens)
        first = module(parts[0])
        y = first.new_empty(x.shape)
        for part, into in zip(parts, chunks(y, chunk_tokens), strict=True):
            into.copy_(first if part is parts[0] else module(part))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dx, sums = torch.empty_like(x, memory_format=torch.contiguous_format), GradientSums()
        for part, part_gradient, into in zip(*(chunks(t, ctx.chunk_tokens) for t in (x, gradient, dx)), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.module(part)
            part_dx, gradients = ctx.module.gradients(y, part, part_gradient)
            assert part_dx is not None
            into.copy_(part_dx)
            sums.add(gradients)
        return None, None, dx, *sums.take(ctx.dtypes)
