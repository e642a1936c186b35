"""Cross-entropy of an output head whose logits exist for one chunk of tokens at a time.

Note: [Gradients in the forward]
The logits of a chunk are computed once. The forward computes the loss and the gradients from them, and the backward
only multiplies by the gradient of the loss. The head's matrix products are therefore those of plain training. The
gradients of the hidden states and of the head's parameters are kept until the backward, the latter in fp32.

Note: [One chunk of logits]
Half-precision logits are copied to fp32, where softmax and gradient are computed in place; fp32 logits are overwritten.
The gradient is written back into the head's logits if the graph does not need them. The memory per logit of a chunk is
at most 4 bytes in fp32 and 6 bytes in half precision. The results of functions after the head are added: with a scale
it is 8 bytes in fp32, with a soft cap 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memo.engine.memory.lazy_tensor import Assembly, LazyTensor
from lightning_memo.engine.modules.token_local_modules import GradientSums, chunks
from lightning_memo.loss.chunked_logits import ChunkedLogits, Columns
from lightning_memo.parallel.local_tensors import awaited
from lightning_memo.utils.retained_graph import NOT_RETAINED, first_derivative, graph_is_retained


def chunked_cross_entropy(
    logits: ChunkedLogits, x: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of the logits of `x`.

    Args:
        logits: Computes the logits.
        x: Hidden states `[..., hidden]`; with several shards `[rows, tokens of this shard, hidden]`.
        target: Labels, int64 or uint8 `[all tokens]`, in the order of rows and tokens.
        ignore_index: Label of tokens that do not contribute to the loss.
        reduction: "mean" over the labels that are not ignored, or "sum".

    Returns:
        The loss, a scalar in fp32.
    """
    valid = target != ignore_index
    one = torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    count = valid.sum() if reduction == "mean" else one
    weight = torch.where(valid, one / count, 0.0)  # finite even if no label is valid, when the loss is 0 / 0
    parts = _Parts(logits, _by_shard(target.masked_fill(~valid, 0).long(), x, logits), _by_shard(weight, x, logits))
    total: Tensor
    if torch.is_grad_enabled() and (x.requires_grad or logits.head.trained):
        total = _ChunkedCrossEntropy.apply(parts, awaited(x), *logits.head.trained)
    else:
        total, *_ = parts.run(awaited(x).detach())
    return torch.where(count > 0, total, torch.nan)


def _by_shard(values: Tensor, x: Tensor, logits: ChunkedLogits) -> Sequence[Tensor]:
    """Split the values of all tokens `[rows * tokens]` into chunks like `x`; a chunk has one shard after the other."""
    rows = x.shape[0] if logits.shards > 1 else 1
    of_shards = values.reshape(rows, logits.shards, -1).transpose(0, 1).reshape(logits.shards, -1)
    return [part.flatten() for part in of_shards.split(logits.chunk_tokens, 1)]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The labels and the weights of the tokens' losses, by chunk."""

    logits: ChunkedLogits
    targets: Sequence[Tensor]
    weights: Sequence[Tensor]

    def run(self, x: Tensor, of_x: bool = False, of_head: bool = False) -> tuple[Tensor, Tensor | None, GradientSums]:
        """Return the loss, the gradient of `x` if `of_x`, and the gradients of the head's parameters if `of_head`."""
        dx, tokens = Assembly.like(x) if of_x else None, self.logits.chunk_tokens
        losses, sums = [], GradientSums()
        for number, (part, target, weight) in enumerate(
            zip(chunks(x, tokens), self.targets, self.weights, strict=True)
        ):
            part = part.detach().requires_grad_(of_x)
            loss, part_dx, gradients = self._run_chunk(part, target, weight, of_x or of_head)
            losses.append(loss)
            sums.add(gradients)
            if dx is not None and part_dx is not None:
                dx.write_rows(number * tokens, part_dx)
        return torch.cat(losses).sum(), None if dx is None else dx.take(), sums

    def _run_chunk(
        self, x: Tensor, target: Tensor, weight: Tensor, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
        with torch.set_grad_enabled(needs_gradient):
            logits, columns, spare = self.logits.compute(x)
        # The logits are overwritten if the graph does not need them (`spare`). `data` hides this from autograd, which
        # refuses it for views. See Note: [One chunk of logits].
        work = logits.data.to(torch.promote_types(logits.dtype, torch.float32), copy=not spare)
        loss = _cross_entropy_(work, target, weight, columns, needs_gradient)
        if not needs_gradient:
            return loss, None, []
        gradient = work
        if work.dtype != logits.dtype:
            gradient = logits.data.copy_(work) if spare else work.to(logits.dtype)
        del work
        return loss, *self.logits.head.gradients(logits, x, gradient)


def _cross_entropy_(logits: Tensor, target: Tensor, weight: Tensor, columns: Columns, gradient: bool) -> Tensor:
    """Return the weighted losses `[tokens]` of fp32 logits `[tokens, columns]`.

    The logits are overwritten, if `gradient` with the gradient of the sum of the losses. With the largest logit `m` of
    a token, `loss = weight * (log(sum(exp(z - m))) - (z_target - m))` and
    `gradient = weight * (softmax(z) - onehot(target))`.
    """
    largest = columns.combine(logits.amax(-1, keepdim=True), dist.ReduceOp.MAX)
    logits.sub_(largest)
    column, here = target - columns.first, torch.ones_like(weight)
    if columns.group is not None:
        here = ((column >= 0) & (column < columns.size)).to(weight.dtype)
        column = column.clamp(0, columns.size - 1)
    column = column[:, None]
    of_target = logits.gather(-1, column)[:, 0] * here
    total = logits.exp_().sum(-1)
    total, of_target = columns.combine(torch.stack([total, of_target]), dist.ReduceOp.SUM)
    if gradient:
        logits.mul_((weight / total)[:, None])
        logits.scatter_add_(-1, column, -(weight * here)[:, None].to(logits.dtype))
    return torch.where(weight == 0, 0.0, weight * (total.log() - of_target))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: _Parts, x: Tensor, *trained: Tensor) -> Tensor:
        loss, dx, sums = parts.run(x, of_x=ctx.needs_input_grad[1], of_head=bool(trained))
        ctx.dtypes, ctx.gradients = [p.dtype for p in trained], (dx, sums)
        return loss

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(NOT_RETAINED)
        dx, sums = ctx.gradients
        if kept := graph_is_retained():
            sums = sums.copy()
        else:
            ctx.gradients = None
        return None, None if dx is None else _scaled(dx, upstream, kept), *sums.take(ctx.dtypes, upstream)


def _scaled(dx: Tensor, upstream: Tensor, kept: bool) -> Tensor:
    if isinstance(dx, LazyTensor):
        factor = upstream.clone()  # rows are computed when they are read
        return dx.mapped(lambda rows: rows * factor, dx.dtype)
    return dx * upstream if kept else dx.mul_(upstream)
