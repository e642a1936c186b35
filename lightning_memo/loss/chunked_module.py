"""Runs a module on chunks of tokens, and saves only its input for the backward.

The module must treat each token independently. Without chunks, the norm after the last layer would save copies of the
complete sequence in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_memo.engine.memory.lazy_tensor import Assembly, LazyTensor
from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.engine.modules.token_local_modules import Forward, GradientSums, TokenLocal, chunk_tokens_of, chunks
from lightning_memo.engine.token_locality.prove_module import ModuleProofs
from lightning_memo.parallel.local_tensors import awaited


def attach_chunks(module: nn.Module, chunk_tokens: int) -> Callable[[], None]:
    """Make a module run on at most `chunk_tokens` tokens at a time.

    Args:
        module: A module from `[batch, tokens, hidden]` to the same shape. It runs on all tokens at once unless it is
            proven to compute each token by itself; see `ModuleProofs`.
        chunk_tokens: Number of tokens, counted over all sequences of a batch.

    Returns:
        A function that undoes the change.
    """
    proofs = ModuleProofs()

    def run(module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or args[0].dim() != 3:
            return forward(*args, **kwargs)
        tokens = chunk_tokens_of(args[0], chunk_tokens)
        if args[0].shape[:-1].numel() <= tokens or proofs.why_not(module, forward, args[0]):
            return forward(*args)
        return run_in_chunks(module, forward, args[0], tokens)

    return replace_forward(module, run)


def run_in_chunks(module: nn.Module, forward: Forward, x: Tensor, chunk_tokens: int) -> Tensor:
    """Run a module on chunks of `x` `[..., hidden]` without saving a graph; the backward recomputes each chunk."""
    local = TokenLocal(module, forward)
    result: Tensor = _InChunks.apply(local, chunk_tokens, awaited(x), *local.trained)
    return result


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: TokenLocal, chunk_tokens: int, x: Tensor, *trained: Tensor) -> Tensor:
        ctx.module, ctx.chunk_tokens, ctx.dtypes = module, chunk_tokens, [p.dtype for p in trained]
        ctx.save_for_backward(x)
        if isinstance(x, LazyTensor):  # the output is lazy too, because it is read only once
            dtype = module(torch.zeros(1, 1, x.shape[-1], dtype=x.dtype, device=x.device)).dtype
            return x.mapped(lambda rows: module(rows[None])[0], dtype)
        y: Assembly | None = None
        for number, part in enumerate(chunks(x, chunk_tokens)):
            part_y = module(part)
            y = y or Assembly(x.shape, part_y.dtype, part_y.device)
            y.write_rows(number * chunk_tokens, part_y)
        assert y is not None
        return y.take()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.module.check_unchanged()
        dx, sums = Assembly.like(x), GradientSums()
        pairs = zip(chunks(x, ctx.chunk_tokens), chunks(gradient, ctx.chunk_tokens), strict=True)
        for number, (part, part_gradient) in enumerate(pairs):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.module(part)
            part_dx, gradients = ctx.module.gradients(y, part, part_gradient)
            assert part_dx is not None
            dx.write_rows(number * ctx.chunk_tokens, part_dx)
            sums.add(gradients)
        return None, None, dx.take(), *sums.take(ctx.dtypes)
