"""Logits of an output head that exist for one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_memo.engine.modules.token_local_modules import TokenLocal, noting_saved
from lightning_memo.parallel.local_tensors import awaited

Pointwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ChunkedLogits:
    """Computes logits from hidden states chunk by chunk.

    Attributes:
        head: The output head. It maps hidden states `[1, tokens, hidden]` to the logits of all sequence-parallel ranks'
            tokens, a tensor or a `DTensor` that is sharded in the vocabulary.
        pointwise: Functions that are applied to the logits after the head.
        chunk_tokens: Number of this process's tokens whose logits exist at the same time.
        shards: Number of sequence-parallel ranks, each with its own part of the tokens of every row.
    """

    head: TokenLocal
    pointwise: Sequence[Pointwise]
    chunk_tokens: int
    shards: int = 1

    def compute(self, x: Tensor) -> tuple[Tensor, Columns, bool]:
        """Return the logits `[tokens, columns]` of a chunk, their columns, and whether they may be overwritten."""
        saved: set[int] = set()
        with noting_saved(saved):
            z = self.head(x)
            columns = Columns.of(z)
            z = awaited(z.to_local() if isinstance(z, DTensor) else z)
            for function in self.pointwise:
                z = function(z)
            z = z.flatten(0, -2)
        return z, columns, z.untyped_storage().data_ptr() not in saved


@dataclass(frozen=True, slots=True)
class Columns:
    """The part of the vocabulary whose logits this process has.

    Attributes:
        first: First token id.
        size: Number of token ids.
        group: Processes that share the vocabulary; `None` if this process has all of it.
    """

    first: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, logits: Tensor) -> Columns:
        if not isinstance(logits, DTensor) or not logits.placements[0].is_shard():
            return cls(0, logits.shape[-1], None)
        mesh, vocabulary = logits.device_mesh, logits.shape[-1]
        per_rank = -(-vocabulary // mesh.size())
        return cls(per_rank * mesh.get_local_rank(), logits.to_local().shape[-1], mesh.get_group())

    def combine(self, t: Tensor, operation: Any) -> Tensor:
        """Reduce `t` over the processes that share the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(t, operation, self.group)
        return t
