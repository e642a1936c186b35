"""Values of each token that are computed from its logits, for example log-probabilities, in chunks of tokens.

Note: [Logits are computed again]
The gradient of a value is not known in the forward, so the backward computes the logits of each chunk once more: the
head's matrix product runs four times in place of three. What is kept are the values and the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_memo.engine.memory.lazy_tensor import Assembly
from lightning_memo.engine.modules.token_local_modules import GradientSums, chunks
from lightning_memo.loss.chunked_logits import ChunkedLogits
from lightning_memo.parallel.local_tensors import awaited

# Maps logits `[tokens, vocabulary]` and further arguments `[tokens, ...]` to values `[tokens, ...]`.
OfTokens = Callable[..., Sequence[Tensor]]


def token_values(
    logits: ChunkedLogits, x: Tensor, values_of: OfTokens, arguments: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Compute values of each token from its logits.

    Args:
        logits: Computes the logits of all of the vocabulary.
        x: Hidden states `[..., hidden]`.
        values_of: Computes the values of some tokens.
        arguments: Further arguments `[all tokens, ...]`, which get no gradients.

    Returns:
        The values, each `[all tokens, ...]`.
    """
    work = _Work(logits, values_of, [t.split(logits.chunk_tokens) for t in arguments])
    if torch.is_grad_enabled() and (x.requires_grad or logits.head.trained):
        return tuple(_TokenValues.apply(work, awaited(x), *logits.head.trained))
    return work.forward(awaited(x))


@dataclass(frozen=True, slots=True)
class _Work:
    """The functions and the arguments of each chunk."""

    logits: ChunkedLogits
    values_of: OfTokens
    arguments: Sequence[Sequence[Tensor]]

    def _parts(self, x: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        for number, part in enumerate(chunks(x, self.logits.chunk_tokens)):
            yield part, [of_chunks[number] for of_chunks in self.arguments]

    def versions(self, x: Tensor) -> list[int]:
        """Return how often what the backward reads again was changed in place."""
        read = [t for t in (x, *(of_chunks[0] for of_chunks in self.arguments)) if type(t) is Tensor]
        return [t._version for t in read if not t.is_inference()]

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the values."""
        found = [self.values_of(self.logits.compute(part)[0], *others) for part, others in self._parts(x)]
        return tuple(torch.cat(values) for values in zip(*found, strict=True))

    def backward(self, x: Tensor, gradients: Sequence[Tensor | None], of_x: bool) -> tuple[Tensor | None, GradientSums]:
        """Return the gradient of `x` if `of_x`, and those of the head's parameters.

        Args:
            x: The hidden states.
            gradients: The gradients of the values; `None` for values that have none.
            of_x: Whether `x` needs a gradient.
        """
        dx, sums, tokens = Assembly.like(x) if of_x else None, GradientSums(), self.logits.chunk_tokens
        for number, (part, others) in enumerate(self._parts(x)):
            rows = [None if t is None else t[number * tokens : (number + 1) * tokens] for t in gradients]
            with torch.enable_grad():
                part = part.detach().requires_grad_(of_x)
                logits, _, _ = self.logits.compute(part)
                leaf = logits.detach().requires_grad_()
                values = self.values_of(leaf, *others)
            pairs = [(value, row) for value, row in zip(values, rows, strict=True) if row is not None]
            of_values, of_rows = zip(*pairs, strict=True)
            (gradient,) = torch.autograd.grad(of_values, leaf, of_rows)
            del values, of_values, pairs
            part_dx, of_head = self.logits.head.gradients(logits, part, gradient)
            sums.add(of_head)
            if dx is not None and part_dx is not None:
                dx.write_rows(number * tokens, part_dx)
        return None if dx is None else dx.take(), sums


class _TokenValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, x: Tensor, *trained: Tensor) -> tuple[Tensor, ...]:
        values = work.forward(x)
        ctx.mark_non_differentiable(*(t for t in values if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.work, ctx.x, ctx.dtypes, ctx.versions = work, x, [p.dtype for p in trained], work.versions(x)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(t is None for t in gradients):
            return None, None, *[None] * len(ctx.dtypes)
        if ctx.work.versions(ctx.x) != ctx.versions:
            raise RuntimeError(
                "hidden states or token ids of which logits were taken were changed in place before their backward, "
                "which computes the logits again: clone() them first, or set loss_chunk_tokens=None"
            )
        dx, sums = ctx.work.backward(ctx.x, gradients, ctx.needs_input_grad[1])
        return None, dx, *sums.take(ctx.dtypes)
