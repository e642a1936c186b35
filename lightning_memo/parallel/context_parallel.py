"""Context parallelism: attention over tokens that are divided over the ranks of a group, and states handed through it.

Note: [Ring attention]
Keys and values circulate around a group of ranks, queries stay local: Liu et al., "Ring Attention with Blockwise
Transformers for Near-Infinite Context" (2023), with tokens in head-tail ("zigzag") order, also within long documents,
which gives all ranks the same causal work. In models that hand states from token to token, each rank holds a contiguous
range instead, and later ranks have more work. Outputs of blocks are merged by their log-sum-exp.

Note: [All-to-all attention]
Each rank computes some heads over all tokens: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling
Training of Extreme Long Sequence Transformer Models" (2023). The inner attention is a kernel or a ring. With a ring,
ranks exchange heads in the inner group and keys in the outer one (Fang and Zhao, "USP: A Unified Sequence Parallelism
Approach for Long Context Generative AI", 2024).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memo.kernels.attention_kernel import (
    AttentionBackend,
    AttentionResult,
    AttentionSpec,
    merge,
    repeat_heads,
    sees_nothing_result,
    sum_head_groups,
    sums_dtype,
)
from lightning_memo.kernels.fallback_kernels import BlockwiseAttention
from lightning_memo.kernels.flash_attention import sees_any
from lightning_memo.parallel.batches.token_layout import Documents, documents_within, ring_chunks

# Selects the kernel for queries, keys and values; it is called with the tensors that the kernel gets.
_Select = Callable[[Tensor, Tensor, Tensor, AttentionSpec], AttentionBackend]


class _RingAttention:
    """Attention over the tokens of a group of which each rank holds a part in layer order; without autograd.

    The documents of a call are those by which the tokens were laid out; see :func:`ring_chunks`. The next keys and
    values are sent while the current ones are used. In the backward, the fp32 gradients of a block's keys and values
    follow the block around the ring and return from the last rank.

    Queries may also attend only to keys of earlier slices. A slice is a range of the sequence that is divided over the
    ring by itself, and each rank contributes its part.

    Args:
        group: Process group of the ring.
        select: Selects the kernel of a block. The kernel must support blocks and return a log-sum-exp.
        bounds: Slice bounds among the local tokens; empty for a single slice.
        contiguous: Whether each rank holds a contiguous range of the tokens.
    """

    name = "ring"

    def __init__(
        self, group: dist.ProcessGroup, select: _Select, bounds: tuple[int, ...] = (), contiguous: bool = False
    ) -> None:
        self.blocks = bool(bounds)
        self._group = group
        self._select = select
        self._bounds, self._contiguous = bounds, contiguous
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        """Returns output and log-sum-exp of local queries, `[batch, heads, tokens / ring, head_dim]`, for all keys.

        Args:
            q: Local queries of all tokens or of one slice.
            k: Local keys of the same tokens, or of earlier slices.
            v: Local values of the same tokens as the keys.
            spec: Attention rules, which refer to positions in the whole sequence.
            query_start: Index of the first query among the local tokens.
            key_start: Index of the first key among the local tokens.

        Raises:
            ValueError: The call has attention dropout or an explicit mask, or only a kernel without a log-sum-exp
                supports it.
        """
        blocks = functools.partial(self._blocks, q, k, spec, query_start, key_start)
        self._check(q, k, v, spec, blocks(self._rank))
        merged = sees_nothing_result(q, v, sums_dtype(q))
        states = []
        for source, keys, values in self._rotate(k, v):
            for block in blocks(source):
                inputs = (block.of_queries(q), block.of_keys(keys), block.of_keys(values))
                part = self._kernel(block, *inputs).forward(*inputs, block.spec, *block.starts)
                merge(block.of_queries(merged.out), block.of_queries(merged.lse), part)
                states.append(part.state)
        return AttentionResult(merged.out.to(q.dtype), merged.lse, states)

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
        """Returns the gradients of the local q, k and v from the output and log-sum-exp over all keys."""
        states = iter(result.state)
        dq = torch.zeros_like(q, dtype=sums_dtype(q))
        own = _zero_gradients(k, v)
        travelling: _Transfer | None = None
        for step, (source, keys, values) in enumerate(self._rotate(k, v)):
            parts = []
            for block in self._blocks(q, k, spec, query_start, key_start, source):
                gradients = self._block_backward(block, dout, q, keys, values, replace(result, state=next(states)))
                block.of_queries(dq).add_(gradients[0])
                parts.append((block, *gradients[1:]))
            if step == 0:
                _add_gradients(own, parts, k, v)
                continue
            # Earlier ranks have added their gradients, which arrived while this rank computed.
            sums = _zero_gradients(k, v) if travelling is None else travelling.wait()
            _add_gradients(sums, parts, k, v)
            travelling = _Transfer(sums, self._group, tag=1)
        if travelling is not None:
            own += travelling.wait()
        dk, dv = _unpack(own, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _rotate(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields a ring rank with its keys and values, this rank first.

        They are sent to the next rank while the caller computes.
        """
        packed = _pack(k, v)
        for step in range(self._size):
            is_last = step == self._size - 1
            transfer = None if is_last else _Transfer(packed, self._group, tag=0)
            yield (self._rank - step) % self._size, *_unpack(packed, k, v)
            if transfer is not None:
                packed = transfer.wait()

    def _check(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, own: list[KernelCall]) -> None:
        """Raises before anything is sent."""
        if spec.dropout:
            raise ValueError(
                f"ring attention cannot drop attention weights (attention dropout is {spec.dropout}): set it to 0, "
                "or set ulysses_size=context_parallel_size"
            )
        if spec.mask is not None:
            raise ValueError("ring attention takes no explicit mask: use lengths, packed documents or a window")
        for block in own:
            self._kernel(block, block.of_queries(q), block.of_keys(k), block.of_keys(v))

    def _blocks(
        self, q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int, source: int
    ) -> list[KernelCall]:
        """Returns the kernel calls of the local queries with the keys of ring rank `source`."""
        queries = self._chunks(query_start, q.shape[2], self._rank, spec.documents)
        return kernel_calls(spec, queries, self._chunks(key_start, k.shape[2], source, spec.documents))

    def _chunks(self, start: int, tokens: int, ring_rank: int, documents: Documents | None) -> list[range]:
        """Returns the positions of a rank's tokens `[start, start + tokens)`, which are complete slices."""
        edges = (0, *(self._bounds or (start + tokens,)))
        slices = [(a, b) for a, b in pairwise(edges) if start <= a and b <= start + tokens]
        size, divide = self._size, functools.partial(ring_chunks, contiguous=self._contiguous)
        return [c for a, b in slices for c in divide(range(a * size, b * size), size, ring_rank, documents)]

    def _kernel(self, block: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> AttentionBackend:
        kernel = self._select(q, k, v, block.spec)
        if not kernel.blocks and block.spec.mask is not None:
            kernel = BlockwiseAttention()  # returns the log-sum-exp of any call
        if not kernel.blocks:
            raise ValueError(
                f"ring attention needs a log-sum-exp, and the kernel for {q.dtype} with head_dim {q.shape[3]} on "
                f'{q.device.type} ("{kernel.name}") gives none: train in half precision, or use '
                "set ulysses_size=context_parallel_size"
            )
        return kernel

    def _block_backward(
        self, block: KernelCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: AttentionResult
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v = block.of_queries(dout), block.of_queries(q), block.of_keys(k), block.of_keys(v)
        part = replace(result, out=block.of_queries(result.out), lse=block.of_queries(result.lse))
        return self._kernel(block, q, k, v).backward(dout, q, k, v, part, block.spec, *block.starts)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel call on some of the local queries and some of the received keys.

    Attributes:
        queries: Range of the local queries.
        keys: Range of the received keys.
        spec: Attention rules between these queries and keys.
        starts: Positions of the first query and the first key, if the spec needs them.
    """

    queries: slice
    keys: slice
    spec: AttentionSpec
    starts: tuple[int, int] = (0, 0)

    def of_queries(self, t: Tensor) -> Tensor:
        return t[:, :, self.queries]

    def of_keys(self, t: Tensor) -> Tensor:
        return t[:, :, self.keys]


def kernel_calls(spec: AttentionSpec, queries: list[range], keys: list[range]) -> list[KernelCall]:
    """Returns the kernel calls of one rank's queries with the keys of one rank.

    Args:
        spec: Attention rules.
        queries: Positions of the queries, one range per chunk.
        keys: Positions of the keys, one range per chunk.
    """
    if spec.whole_mask is not None:
        everything, all_keys = (slice(0, sum(map(len, chunks))) for chunks in (queries, keys))
        return [KernelCall(everything, all_keys, _with_mask_of(spec, queries, keys))]
    contiguous = len(queries) == 1 and spec.causal and queries != keys
    if spec.window is None and spec.lengths is None and spec.documents is None and not contiguous:
        return [_rectangle(spec, queries, keys)]
    return list(_chunk_pairs(spec, queries, keys))


def _with_mask_of(
    spec: AttentionSpec, queries: Iterable[range] | None = None, keys: Iterable[range] | None = None
) -> AttentionSpec:
    """Returns attention rules in which the part of a whole mask for some queries and keys is the mask.

    Args:
        spec: Attention rules.
        queries: Positions of the queries; `None` for all.
        keys: Positions of the keys; `None` for all.
    """
    mask = spec.whole_mask
    if mask is None:
        return spec
    for dim, chunks in ((-2, queries), (-1, keys)):
        if chunks is not None:
            mask = torch.cat([mask.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)
    return replace(spec, mask=mask, whole_mask=None, lengths=None, documents=None)


def _rectangle(spec: AttentionSpec, queries: list[range], keys: list[range]) -> KernelCall:
    """Returns the single call that head-tail order needs.

    It covers all chunks of the rank's own keys; of other ranks' keys, half of the queries or half of the keys.
    """
    count, keys_count = sum(map(len, queries)), sum(map(len, keys))
    everything, all_keys = slice(0, count), slice(0, keys_count)
    if not spec.causal or queries == keys:
        return KernelCall(everything, all_keys, spec)
    unmasked = replace(spec, causal=False)
    if keys[0].start < queries[0].start:  # the first half of the keys is before all queries, the second half after
        return KernelCall(everything, slice(0, keys_count // 2), unmasked)
    return KernelCall(slice(count // 2, count), all_keys, unmasked)


def _chunk_pairs(spec: AttentionSpec, queries: list[range], keys: list[range]) -> Iterator[KernelCall]:
    """Yields a call for each chunk of queries and each chunk of keys that it attends to, at absolute positions."""
    first_query = 0
    for query_chunk in queries:
        first_key = 0
        for key_chunk in keys:
            if sees_any(spec, query_chunk, key_chunk):
                is_past = spec.window is None and key_chunk.stop <= query_chunk.start
                yield KernelCall(
                    slice(first_query, first_query + len(query_chunk)),
                    slice(first_key, first_key + len(key_chunk)),
                    replace(spec, causal=False) if is_past else spec,
                    (query_chunk.start, key_chunk.start),
                )
            first_key += len(key_chunk)
        first_query += len(query_chunk)


class _Transfer:
    """Asynchronous send of a buffer to the next rank of the ring, and receive from the previous rank."""

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._sent = buffer  # must stay alive until it is sent
        self._received = torch.empty_like(buffer)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, group=group, tag=tag, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._received, group=group, tag=tag, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Concatenates keys and values, in token order, to one flat buffer for a single message."""
    return torch.cat([t.transpose(1, 2).reshape(-1) for t in (k, v)])


def _unpack(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views of a packed buffer with the shapes of `k` and `v`."""
    key, value = packed.split([k.numel(), v.numel()])
    return key.view_as(k.transpose(1, 2)).transpose(1, 2), value.view_as(v.transpose(1, 2)).transpose(1, 2)


def _zero_gradients(k: Tensor, v: Tensor) -> Tensor:
    return k.new_zeros(k.numel() + v.numel(), dtype=sums_dtype(k))


def _add_gradients(packed: Tensor, parts: list[tuple[Any, ...]], k: Tensor, v: Tensor) -> None:
    dk, dv = _unpack(packed, k, v)
    for block, dk_part, dv_part in parts:
        block.of_keys(dk).add_(dk_part)
        block.of_keys(dv).add_(dv_part)


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

    def result_to_tokens(self, result: AttentionResult, spec: AttentionSpec) -> AttentionResult:
        """Return a result for some heads of all tokens as one for all heads of the local tokens.

        Without sinks, which are merged into it, the log-sum-exp stays as it is: only :meth:`result_to_heads` reads it.
        """
        (out,) = self.to_tokens(result.out)
        lse = result.lse if spec.sinks is None else self.to_tokens(result.lse[..., None])[0][..., 0]
        return replace(result, out=out, lse=lse)

    def result_to_heads(self, result: AttentionResult, out: Tensor, spec: AttentionSpec) -> AttentionResult:
        """Inverse of :meth:`result_to_tokens`, with an output that was exchanged together with other tensors."""
        lse = result.lse if spec.sinks is None else self.to_heads(result.lse[..., None])[0][..., 0]
        return replace(result, out=out, lse=lse)

    def _exchange(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sends part `i` of each tensor `[ulysses, batch, tokens, heads, head_dim]` to rank `i`, in one message."""
        sent = torch.cat([t.reshape(self._size, -1) for t in tensors], 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        parts = received.split([t[0].numel() for t in tensors], 1)
        return [part.reshape(t.shape) for part, t in zip(parts, tensors, strict=True)]


class _UlyssesAttention:
    """Attention over the tokens of a group of which each rank holds a contiguous part; without autograd.

    Without sinks, the log-sum-exp keeps the layout of the inner attention, some heads of all tokens. It has as many
    entries as all heads of the local tokens.

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

        With sinks, the log-sum-exp is `[batch, heads, tokens / ulysses]`.

        Raises:
            ValueError: The number of ranks does not divide the heads, or there is an explicit mask.
        """
        if spec.mask is not None:
            raise ValueError("all-to-all attention takes no explicit mask: use lengths, packed documents or a window")
        copies = self._exchange.copies(q, k)
        q, k, v = self._exchange.to_heads(q, repeat_heads(k, copies), repeat_heads(v, copies))
        return self._exchange.result_to_tokens(self._inner.forward(q, k, v, spec), spec)

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
        result = self._exchange.result_to_heads(result, out, spec)
        dq, dk, dv = self._exchange.to_tokens(*self._inner.backward(dout, q, k, v, result, spec))
        return dq, sum_head_groups(dk, copies), sum_head_groups(dv, copies)


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """Process groups over which tokens are divided.

    Attributes:
        ring: Ring-attention group; `None` without ring attention.
        ulysses: All-to-all group; `None` without Ulysses attention.
        states: Hands states from each rank to the one with the next tokens; `None` if no layer has a state. With it,
            each rank holds a contiguous range of the tokens.
        everyone: All of these processes, in the order of their context-parallel ranks.
    """

    ring: dist.ProcessGroup | None = None
    ulysses: dist.ProcessGroup | None = None
    states: StateExchange | None = None
    everyone: dist.ProcessGroup | None = None

    @property
    def ring_size(self) -> int:
        return 1 if self.ring is None else dist.get_world_size(self.ring)

    @property
    def ulysses_size(self) -> int:
        return 1 if self.ulysses is None else dist.get_world_size(self.ulysses)

    @property
    def rank(self) -> int:
        """This process among all of these."""
        ring, ulysses = (0 if group is None else dist.get_rank(group) for group in (self.ring, self.ulysses))
        return ring * self.ulysses_size + ulysses

    @property
    def contiguous(self) -> bool:
        """Whether each rank holds a contiguous range of the tokens."""
        return self.states is not None

    def ring_kernel(self, select: _Select, bounds: tuple[int, ...] = ()) -> AttentionBackend:
        """Returns attention over the ring, or local attention without a ring. Heads are already exchanged for tokens.

        Args:
            select: As for :class:`ContextAttention`.
            bounds: Slice bounds among the tokens of a ring rank; empty for a single slice.
        """
        if self.ring is None:
            return EachCallsKernel(select)
        return _RingAttention(self.ring, select, bounds, self.contiguous)


class ContextAttention:
    """Attention of the local queries over the keys of all context-parallel ranks.

    Local tokens are in the order of :meth:`TokenLayout.layer_order`. Nothing is sent for documents that are whole.

    Args:
        groups: A ring group, an all-to-all group, or both (all-to-all inside, ring outside).
        select: Selects the kernel. It is called with the tensors that the kernel gets.
        sliced: Whether slices run one after the other, each with all earlier keys. Another class implements this.

    Raises:
        ValueError: Neither group is given.
    """

    def __init__(self, groups: ContextGroups, select: _Select, sliced: bool = False) -> None:
        self.blocks = sliced
        if groups.ring is None and groups.ulysses is None:
            raise ValueError("context-parallel attention needs a ring group, an all-to-all group, or both; got none")
        attention = groups.ring_kernel(select)
        names = [] if groups.ring is None else ["ring"]
        if groups.ulysses is not None:
            attention = _UlyssesAttention(groups.ulysses, attention)
            names.insert(0, "ulysses")
        self._divided = attention
        self._whole = EachCallsKernel(select)
        self._processes, self._process = groups.ring_size * groups.ulysses_size, groups.rank
        self.name = "+".join(names)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        """Returns the output of the local queries, `[batch, heads, local tokens, head_dim]`.

        Lengths, documents and the window of `spec` refer to positions in the whole sequence.

        Raises:
            ValueError: The ring or the all-to-all exchange does not support the call.
        """
        parts = self._parts(q.shape[2], spec)
        if len(parts) == 1:
            return parts[0].attention.forward(q, k, v, parts[0].spec)
        results = [part.attention.forward(*map(part.of, (q, k, v)), part.spec) for part in parts]
        out = torch.cat([result.out.transpose(1, 2) for result in results], 1).transpose(1, 2)
        lse = torch.cat([_lse_of_tokens(result) for result in results], 2)
        return AttentionResult(out, lse, [(result.lse.shape, result.state) for result in results])

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
        parts = self._parts(q.shape[2], spec)
        if len(parts) == 1:
            return parts[0].attention.backward(dout, q, k, v, result, parts[0].spec)
        gradients = []
        for part, (shape, state) in zip(parts, result.state, strict=True):
            lse = part.of(result.lse).flatten()[: shape.numel()].view(shape)
            own = AttentionResult(part.of(result.out), lse, state)
            gradients.append(part.attention.backward(*map(part.of, (dout, q, k, v)), own, part.spec))
        dq, dk, dv = (torch.cat(of_parts, 2) for of_parts in zip(*gradients, strict=True))
        return dq, dk, dv

    def _parts(self, tokens: int, spec: AttentionSpec) -> list[_PartOfTokens]:
        """Returns the local tokens that are divided over the processes, and those of whole documents."""
        if spec.shared_tokens is None:
            return [_PartOfTokens(slice(0, tokens), self._divided, spec)]
        shared = spec.shared_tokens // self._processes
        start = spec.shared_tokens + self._process * (tokens - shared)
        own = documents_within(spec.documents, start, start + tokens - shared)
        whole = replace(spec, documents=own, shared_tokens=None)
        divided = replace(spec, documents=documents_within(spec.documents, 0, spec.shared_tokens), shared_tokens=None)
        parts = [
            _PartOfTokens(slice(0, shared), self._divided, divided),
            _PartOfTokens(slice(shared, tokens), self._whole, whole),
        ]
        return [part for part in parts if part.tokens.start < part.tokens.stop]


@dataclass(frozen=True, slots=True)
class _PartOfTokens:
    """Some of the local tokens, which see no others.

    Attributes:
        tokens: Range of the local tokens.
        attention: Computes their attention.
        spec: Attention rules. Their positions count from the first token of the part, over all processes.
    """

    tokens: slice
    attention: AttentionBackend
    spec: AttentionSpec

    def of(self, t: Tensor) -> Tensor:
        return t[:, :, self.tokens]


def _lse_of_tokens(result: AttentionResult) -> Tensor:
    """Returns a log-sum-exp as `[batch, heads, local tokens]`, which only its own kernel can read.

    It may be that of some heads of more tokens, where processes exchange heads, or have no entries.
    """
    shape = result.out.shape[:3]
    return result.lse.reshape(shape) if result.lse.numel() else result.lse.new_zeros(shape)


class EachCallsKernel:
    """Attention by local kernels, selected for each call. Queries and keys are all tokens.

    Args:
        select: As for :class:`ContextAttention`.
    """

    name = "local"
    blocks = True

    def __init__(self, select: _Select) -> None:
        self._select = select

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        spec = _with_mask_of(spec)
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
        spec = _with_mask_of(spec)
        return self._select(q, k, v, spec).backward(dout, q, k, v, result, spec, query_start, key_start)


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a state is, without its values."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, t: Tensor) -> StateShape:
        return cls(t.shape, t.dtype, t.device, t.requires_grad)

    def zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class StateLink:
    """A process from which states come, or to which they go, and the group in which they are sent."""

    group: dist.ProcessGroup
    rank: int


class StateExchange:
    """Point-to-point messages between the processes that share the tokens of a sequence.

    All processes make the same calls in the same order, so that messages need neither numbers nor shapes. Nothing else
    is sent in these groups. NCCL sends what two ranks of a group send each other one after the other: states from the
    last rank to the first have a group of their own, so that two ranks do not wait for each other.

    Args:
        onward: The processes, in the order of their tokens.
        around: The same processes, for the states that go from the last one to the first.
    """

    def __init__(self, onward: dist.ProcessGroup, around: dist.ProcessGroup) -> None:
        self._onward, self._around = onward, around
        self._size, self._rank = dist.get_world_size(onward), dist.get_rank(onward)
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._shapes: dict[Hashable, StateShape] = {}

    def before(self, first: bool, by_slice: bool) -> StateLink | None:
        """Return the process that has the state at the start of a slice; `None` if this one has it, or there is none.

        Args:
            first: Whether the slice is the first one of this process.
            by_slice: Whether processes share the tokens of every slice. Otherwise, each has its own slices.
        """
        if self._rank > 0 and (first or by_slice):
            return StateLink(self._onward, self._rank - 1)
        return StateLink(self._around, self._size - 1) if by_slice and not first else None

    def after(self, last: bool, by_slice: bool) -> StateLink | None:
        """Return the process that needs the state at the end of a slice; `None` if this one needs it, or none does.

        Args:
            last: Whether the slice is the last one of this process.
            by_slice: As for :meth:`before`.
        """
        if self._rank < self._size - 1 and (last or by_slice):
            return StateLink(self._onward, self._rank + 1)
        return StateLink(self._around, 0) if by_slice and not last else None

    def send(self, t: Tensor, link: StateLink) -> None:
        """Begin to send a tensor to another process."""
        t = t.contiguous()
        if t.numel() and (work := dist.isend(t, group=link.group, group_dst=link.rank)) is not None:
            self._sent.append((work, t))  # which must live until it is sent

    def receive(self, shape: StateShape, link: StateLink) -> Tensor:
        """Return a tensor from another process."""
        t = torch.empty(shape.size, dtype=shape.dtype, device=shape.device)
        if t.numel():
            dist.recv(t, group=link.group, group_src=link.rank)
        return t

    def settle(self) -> None:
        """Wait until everything has been sent.

        At the end of a layer, this takes no time: the receiver is one recurrence behind.
        """
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def shape_of(self, form: Hashable, find: Callable[[], StateShape]) -> StateShape:
        """Return what `find` has returned for the first call of a form."""
        if form not in self._shapes:
            self._shapes[form] = find()
        return self._shapes[form]
