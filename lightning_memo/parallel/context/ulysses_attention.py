"""All-to-all attention: each rank computes some heads over all tokens.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models" (2023). The inner attention is a kernel or a ring. With a ring, ranks exchange heads in the inner group and keys
in the outer one (Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memo.kernels.attention_kernel import (
    AttentionBackend,
    AttentionResult,
    AttentionSpec,
    repeat_heads,
    sum_head_groups,
)


class HeadExchange:
    """All-to-all between all heads of the local tokens and some heads of all tokens of a group.

    Args:
        group: Process group. Each rank holds a contiguous part of the tokens.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def copies(self, q: Tensor, k: Tensor) -> int:
        """Returns the smallest number of copies of each key and value head with which every rank gets its heads.

        Raises:
            ValueError: The number of ranks does not divide the number of query heads.
        """
        heads, kv_heads = q.shape[1], k.shape[1]
        if heads % self._size:
            raise ValueError(
                f"{heads} attention heads cannot be divided over {self._size} all-to-all processes: use a number of "
                "processes that divides the heads, or ulysses_size=1 (ring attention)"
            )
        return self._size // math.gcd(self._size, kv_heads)

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """`[batch, heads, tokens / group, head_dim]` to `[batch, heads / group, tokens, head_dim]`, in one message."""
        split = [t.transpose(1, 2).unflatten(2, (self._size, -1)).movedim(2, 0) for t in tensors]
        return [part.movedim(0, 1).flatten(1, 2).transpose(1, 2) for part in self._exchange(split)]

    def to_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """Inverse of :meth:`to_heads`."""
        split = [t.transpose(1, 2).unflatten(1, (self._size, -1)).movedim(1, 0) for t in tensors]
        return [part.movedim(0, 2).flatten(2, 3).contiguous().transpose(1, 2) for part in self._exchange(split)]

    def _exchange(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sends part `i` of each tensor `[ulysses, batch, tokens, heads, head_dim]` to rank `i`, in one message."""
        sent = torch.cat([t.reshape(self._size, -1) for t in tensors], 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        parts = received.split([t[0].numel() for t in tensors], 1)
        return [part.reshape(t.shape) for part, t in zip(parts, tensors, strict=True)]


class UlyssesAttention:
    """Attention over the tokens of a group of which each rank holds a contiguous part; without autograd.

    The log-sum-exp keeps the layout of the inner attention, some heads of all tokens. It has as many entries as all
    heads of the local tokens.

    Args:
        group: Process group that exchanges heads for tokens.
        inner: Attention over all tokens of the group.
    """

    name = "ulysses"
    blocks = False

    def __init__(self, group: dist.ProcessGroup, inner: AttentionBackend) -> None:
        self._exchange = HeadExchange(group)
        self._inner = inner

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        """Output `[batch, heads, tokens / ulysses, head_dim]`; log-sum-exp `[batch, heads / ulysses, tokens]`.

        Raises:
            ValueError: The number of ranks does not divide the heads, or there is an explicit mask.
        """
        if spec.mask is not None:
            raise ValueError("all-to-all attention takes no explicit mask: use lengths, packed documents or a window")
        copies = self._exchange.copies(q, k)
        q, k, v = self._exchange.to_heads(q, repeat_heads(k, copies), repeat_heads(v, copies))
        result = self._inner.forward(q, k, v, spec)
        (out,) = self._exchange.to_tokens(result.out)
        return replace(result, out=out)

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
        """Returns the gradients of the local q, k and v from the result of the forward."""
        copies = self._exchange.copies(q, k)
        k, v = repeat_heads(k, copies), repeat_heads(v, copies)
        dout, q, k, v, out = self._exchange.to_heads(dout, q, k, v, result.out)
        dq, dk, dv = self._exchange.to_tokens(*self._inner.backward(dout, q, k, v, replace(result, out=out), spec))
        return dq, sum_head_groups(dk, copies), sum_head_groups(dv, copies)
