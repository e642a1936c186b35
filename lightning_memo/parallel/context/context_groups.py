"""Process groups of context parallelism, and attention over the tokens of all their ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionBackend, AttentionResult, AttentionSpec
from lightning_memo.parallel.context.ring_attention import RingAttention, Select, with_mask_of
from lightning_memo.parallel.context.state_exchange import StateExchange
from lightning_memo.parallel.context.ulysses_attention import UlyssesAttention


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """Process groups over which tokens are divided.

    Attributes:
        ring: Ring-attention group; `None` without ring attention.
        ulysses: All-to-all group; `None` without Ulysses attention.
        states: Hands states from each rank to the one with the next tokens; `None` if no layer has a state. With it,
            each rank holds a contiguous range of the tokens.
    """

    ring: dist.ProcessGroup | None = None
    ulysses: dist.ProcessGroup | None = None
    states: StateExchange | None = None

    @property
    def ring_size(self) -> int:
        return 1 if self.ring is None else dist.get_world_size(self.ring)

    @property
    def ulysses_size(self) -> int:
        return 1 if self.ulysses is None else dist.get_world_size(self.ulysses)

    @property
    def contiguous(self) -> bool:
        """Whether each rank holds a contiguous range of the tokens."""
        return self.states is not None

    def ring_kernel(self, select: Select, bounds: tuple[int, ...] = ()) -> AttentionBackend:
        """Returns attention over the ring, or local attention without a ring. Heads are already exchanged for tokens.

        Args:
            select: As for :class:`ContextAttention`.
            bounds: Slice bounds among the tokens of a ring rank; empty for a single slice.
        """
        if self.ring is None:
            return EachCallsKernel(select)
        return RingAttention(self.ring, select, bounds, self.contiguous)


class ContextAttention:
    """Attention of the local queries over the keys of all context-parallel ranks.

    Local tokens are in the order of :meth:`TokenLayout.layer_order`.

    Args:
        groups: A ring group, an all-to-all group, or both (all-to-all inside, ring outside).
        select: Selects the kernel. It is called with the tensors that the kernel gets.
        sliced: Whether slices run one after the other, each with all earlier keys. Another class implements this.

    Raises:
        ValueError: Neither group is given.
    """

    def __init__(self, groups: ContextGroups, select: Select, sliced: bool = False) -> None:
        self.blocks = sliced
        if groups.ring is None and groups.ulysses is None:
            raise ValueError("context-parallel attention needs a ring group, an all-to-all group, or both; got none")
        attention = groups.ring_kernel(select)
        names = [] if groups.ring is None else ["ring"]
        if groups.ulysses is not None:
            attention = UlyssesAttention(groups.ulysses, attention)
            names.insert(0, "ulysses")
        self._attention = attention
        self.name = "+".join(names)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        """Returns the output of the local queries, `[batch, heads, local tokens, head_dim]`.

        Lengths, documents and the window of `spec` refer to positions in the whole sequence.

        Raises:
            ValueError: The ring or the all-to-all exchange does not support the call.
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
        """Returns the gradients of the local q, k and v."""
        return self._attention.backward(dout, q, k, v, result, spec)


class EachCallsKernel:
    """Attention by local kernels, selected for each call. Queries and keys are all tokens.

    Args:
        select: As for :class:`ContextAttention`.
    """

    name = "local"
    blocks = True

    def __init__(self, select: Select) -> None:
        self._select = select

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        spec = with_mask_of(spec)
        return self._select(q, k, v, spec).forward(q, k, v, spec, query_start, key_start)

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
        spec = with_mask_of(spec)
        return self._select(q, k, v, spec).backward(dout, q, k, v, result, spec, query_start, key_start)
