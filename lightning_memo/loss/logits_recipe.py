"""How logits that are not computed yet will be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_memo.engine.modules.token_local_modules import Forward, TokenLocal, chunk_tokens_of, chunks
from lightning_memo.loss.chunked_cross_entropy import ChunkedLogits, Pointwise


@dataclass(eq=False, slots=True)
class Head:
    """A model's output head while its logits are lazy.

    Attributes:
        module: The head.
        forward: Its own forward.
        chunk_tokens: Tokens of this process whose logits exist at once.
        shards: Sequence-parallel ranks, each with its own part of the tokens of every row.
        parts: Processes that share the logits of a token, which are then a `DTensor`.
        steps: Optimizer steps that changed its weights.
    """

    module: nn.Module
    forward: Forward
    chunk_tokens: int
    shards: int = 1
    parts: int = 1
    steps: int = 0

    def replicated(self, t: Tensor) -> Tensor:
        """What all processes that share the logits of a token computed alike, in the type of those logits."""
        if self.parts == 1:
            return t
        mesh = next(p.device_mesh for p in self.module.parameters() if isinstance(p, DTensor))
        return DTensor.from_local(t, mesh, [Replicate()], run_check=False)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note that an optimizer has stepped: a hook of `torch.optim`."""
        own = {id(p) for p in self.module.parameters()}
        self.steps += any(id(p) in own for group in optimizer.param_groups for p in group["params"])


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to compute logits: `pointwise(head(x))`, arranged as `leading`.

    Attributes:
        x: Hidden states `[..., hidden]`; with several shards `[rows, tokens of this one, hidden]`.
        leading: Dimensions of the logits before the vocabulary.
        tracked: Whether the logits are part of a graph.
        step: `head.steps` when `x` was computed.
        autocast: Autocast as it was then.
    """

    head: Head
    x: Tensor
    leading: tuple[int, ...]
    pointwise: tuple[Pointwise, ...]
    tracked: bool
    step: int
    autocast: Callable[[], AbstractContextManager[Any]]

    def check(self) -> None:
        """Refuse logits of weights that are gone."""
        if self.head.steps != self.step:
            raise RuntimeError(
                "logits of long sequences are computed when they are used, and the optimizer has changed the head "
                "since this forward: take what you need of them within the step, or set loss_chunk_tokens=None"
            )

    def compute(self) -> Tensor:
        """Real logits."""
        self.check()
        with torch.set_grad_enabled(self.tracked), self.autocast():
            logits = self.head.forward(self.x)
            for function in self.pointwise:
                logits = function(logits)
            shape = (*self.leading, logits.shape[-1])
            return logits if logits.shape == shape else logits.reshape(shape)

    def tokens_first(self) -> Tensor:
        """Hidden states arranged like the logits, `[*leading, hidden]`; of one shard only."""
        return self.x.reshape(*self.leading, self.x.shape[-1])

    def in_chunks(self) -> ChunkedLogits:
        """The same logits, chunk by chunk."""
        self.check()
        with self.autocast():
            local = TokenLocal(self.head.module, self.head.forward)
        tokens = chunk_tokens_of(self.x, self.head.chunk_tokens)
        return ChunkedLogits(local, self.pointwise, tokens, self.head.shards)

    def argmax(self) -> Tensor:
        """The token of the largest logit, `[*leading]`; of one shard only."""
        logits, found = self.in_chunks(), []
        with torch.no_grad():
            for part in chunks(self.x, logits.chunk_tokens):
                whole = logits.head(part)
                for function in logits.pointwise:
                    whole = function(whole)
                found.append((whole.full_tensor() if isinstance(whole, DTensor) else whole).argmax(-1))
        return torch.cat(found, 1).view(self.leading)


def leaves_vocabulary(index: Any, dims: int) -> bool:
    """Whether an index of logits with `dims` dimensions takes the whole vocabulary and leaves it the last dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is ... or type(part) in (int, slice, Tensor) for part in parts):
        return False
    used, last = sum(_dims_used(part) for part in parts), parts[-1]
    reaches = used == dims or (last is not ... and any(part is ... for part in parts))
    return used <= dims and (not reaches or (isinstance(last, slice) and last == slice(None)))


def _dims_used(part: Any) -> int:
    if part is None or part is ...:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1
