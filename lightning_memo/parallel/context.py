"""Context parallelism: the attention of a process that holds some of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lightning_memo.kernels.attention import AttentionBackend, AttentionResult, AttentionSpec
from lightning_memo.parallel.ring import RingAttention, Select
from lightning_memo.parallel.ulysses import UlyssesAttention


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """The process groups over which tokens are split; `None` where there is no such splitting."""

    ring: dist.ProcessGroup | None = None
    ulysses: dist.ProcessGroup | None = None


class ContextAttention:
    """Attention over the local tokens, in the order of :meth:`TokenLayout.layer_order`, that sees those of all.

    Args:
        groups: A ring, an all-to-all group, or both (all-to-all inside, ring outside).
        select: Gives the kernel for tensors, called with those that the kernel gets.

    Raises:
        ValueError: Neither group is given.
    """

    blocks = False

    def __init__(self, groups: ContextGroups, select: Select) -> None:
        if groups.ring is None and groups.ulysses is None:
            raise ValueError("context-parallel attention needs a ring group, an all-to-all group, or both; got none")
        attention: AttentionBackend = _Local(select) if groups.ring is None else RingAttention(groups.ring, select)
        names = [] if groups.ring is None else ["ring"]
        if groups.ulysses is not None:
            attention = UlyssesAttention(groups.ulysses, attention)
            names.insert(0, "ulysses")
        self._attention = attention
        self.name = "+".join(names)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        """Output of the local queries `[batch, heads, local tokens, head_dim]`; see the parts for what they refuse.

        Lengths, documents and the window of `spec` are about positions in the whole sequence.
        """
        return self._attention.forward(q, k, v, spec)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        query_start: int = 0,
        key_start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the local q, k, v."""
        return self._attention.backward(dout, q, k, v, result, spec)


class _Local:
    """The kernel of the process itself, chosen for each call."""

    name = "local"
    blocks = False

    def __init__(self, select: Select) -> None:
        self._select = select

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        return self._select(q, k, v, spec).forward(q, k, v, spec)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        query_start: int = 0,
        key_start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._select(q, k, v, spec).backward(dout, q, k, v, result, spec)
