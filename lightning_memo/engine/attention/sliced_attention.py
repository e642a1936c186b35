"""Attention of a layer call slice by slice, or of a whole sequence.

The keys and values of all tokens are on the device, or on the host, from where they are read in blocks (FPDT, section
4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memo.engine.copy_streams import CopyEvent
from lightning_memo.engine.memory.block_reader import BlockParts, BlockReader, DeviceBlock, heads_first
from lightning_memo.engine.memory.host import HostBuffer, HostRange
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.kernels import AttentionBackend, AttentionResult, AttentionSpec
from lightning_memo.kernels.attention_kernel import (
    detached,
    gradient_of_sinks,
    merge,
    merge_sinks,
    repeat_heads,
    sum_head_groups,
    sums_dtype,
)
from lightning_memo.parallel.context_parallel import HeadExchange
from lightning_memo.planner.streamed_bytes import blocks_of
from lightning_memo.planner.token_slices import TokenRange

_KeysValues = tuple[Tensor, Tensor]


class KeysValuesSource(Protocol):
    """Keys and values of one slice, `[batch, heads, tokens, head_dim]`, stored or recomputed."""

    def peek(self) -> tuple[Tensor, Tensor]:
        """Return both while the forward still runs."""

    def end_forward(self) -> None:
        """Drop what only the forward needs."""

    def load(self) -> tuple[Tensor, Tensor]:
        """Return both on the device in the backward."""


class SlicedAttention:
    """Causal attention slice by slice, without autograd.

    The forward of slice `i` attends to the keys of slices `0 .. i` in one kernel call, so that its output is rounded
    once, as in plain training. The backward runs from the last slice to the first. It adds to the key and value
    gradients of every slice that the forward attended to, in fp32 for half-precision tensors.

    Args:
        backend: The kernel. For more than one slice it must compute blocks.
        slices: The token ranges of the slices, in order.
    """

    def __init__(self, backend: AttentionBackend, slices: Sequence[TokenRange]) -> None:
        self._backend = backend
        self._slices = slices
        self._keys_values: dict[int, KeysValuesSource] = {}
        self._joined = _JoinedSlices([part.tokens for part in slices])
        self._gradients = _DeviceGradients()

    def forward(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[AttentionResult, Tensor, Tensor]:
        """Compute the attention of slice `index`.

        Args:
            index: Number of the slice.
            q: Queries of the slice, `[batch, heads, tokens, head_dim]`.
            k: Keys of the slice.
            v: Values of the slice.
            spec: The keys that each query sees.

        Returns:
            The result, and the keys and values to pass to `hold` once they are stored.
        """
        return self._attend(index, q, k, v, spec, lambda n: self._keys_values[n].peek()), k, v

    def forward_again(self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
        """Compute the attention of slice `index` again in the backward, if its result was not stored."""
        return self._attend(index, q, k, v, spec, lambda n: self._keys_values[n].load())

    def hold(self, index: int, keys_values: KeysValuesSource) -> None:
        """Register the keys and values of a slice for later slices and for the backward."""
        self._keys_values[index] = keys_values

    def end_forward(self) -> None:
        """End the layer's forward: no slice runs before the backward."""
        self._joined.clear()
        for keys_values in self._keys_values.values():
            keys_values.end_forward()

    def backward(
        self,
        index: int,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the slice's q, k and v, including the contributions of later slices.

        The backward of all later slices must have run before.
        """
        seen = self._seen_by(index, spec)
        keys, values = self._join(index, k, v, spec, lambda n: self._keys_values[n].load())
        start = self._start(seen, index)
        dq, *dkv = self._backend.backward(dout, q, keys, values, result, spec, self._slices[index].start, start)
        if index == 0:
            self._joined.clear()
        if not seen:  # keys of another sequence may have another length
            return dq, *self._gradients.take(index, *dkv)
        lengths = [self._slices[n].tokens for n in (*seen, index)]
        parts = list(zip(*(grad.split(lengths, 2) for grad in dkv), strict=True))
        for earlier, (dk, dv) in zip(seen, parts, strict=False):
            self._gradients.add(earlier, dk, dv)
        return dq, *self._gradients.take(index, *parts[-1])

    def _attend(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bring: Callable[[int], _KeysValues]
    ) -> AttentionResult:
        keys, values = self._join(index, k, v, spec, bring)
        start = self._start(self._seen_by(index, spec), index)
        return self._backend.forward(q, keys, values, spec, self._slices[index].start, start)

    def _join(
        self, index: int, k: Tensor, v: Tensor, spec: AttentionSpec, bring: Callable[[int], _KeysValues]
    ) -> _KeysValues:
        """Return the keys and values that the slice sees, `[batch, heads, keys, head_dim]`.

        Args:
            index: Number of the slice.
            k: Keys of the slice.
            v: Values of the slice.
            spec: The keys that each query sees.
            bring: Returns the keys and values of an earlier slice.
        """
        seen = self._seen_by(index, spec)
        if not seen:
            return k, v
        if spec.window is None:
            return self._joined.up_to(index, k, v, bring)
        # Buffers for all slices would waste memory.
        keys, values = zip(*map(bring, seen), (k, v), strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def _seen_by(self, index: int, spec: AttentionSpec) -> list[int]:
        """Return the earlier slices of which the slice sees any key. They directly precede it."""
        start = self._slices[index].start
        return [n for n in range(index) if not spec.sees_nothing(start, self._slices[n].stop)]

    def _start(self, seen: list[int], index: int) -> int:
        return self._slices[seen[0] if seen else index].start

    def rewind(self) -> None:
        """End a backward that another one may follow."""
        self._joined.clear()
        self._gradients = _DeviceGradients()

    def release(self) -> None:
        """End the layer's backward."""
        self._joined.clear()


class _DeviceGradients:
    """Gradients of keys and values, to which later slices add their contributions, on the device.

    They are in fp32 for half precision.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, index: int, dk: Tensor, dv: Tensor) -> None:
        """Add a later slice's contribution to the gradients of slice `index`, `[batch, heads, tokens, head_dim]`."""
        if index not in self._sums:
            self._sums[index] = (dk.to(sums_dtype(dk), copy=True), dv.to(sums_dtype(dv), copy=True))
            return
        for total, part in zip(self._sums[index], (dk, dv), strict=True):
            total += part

    def take(self, index: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of slice `index`, including its own contributions `dk` and `dv`."""
        if index not in self._sums:
            return dk, dv
        later_dk, later_dv = self._sums.pop(index)
        return (later_dk + dk).to(dk.dtype), (later_dv + dv).to(dv.dtype)


class _JoinedSlices:
    """The keys and values of the first slices of a layer call, side by side, to which each slice is copied once.

    The forward adds slice after slice. The backward begins with all slices, and then uses ever fewer of them.

    Args:
        tokens: Number of tokens of each slice.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._stops = list(accumulate(tokens))
        self._buffers: _KeysValues | None = None
        self._slices = 0  # that the buffers hold

    def up_to(self, index: int, k: Tensor, v: Tensor, bring: Callable[[int], _KeysValues]) -> _KeysValues:
        """Return the keys and values of the slices up to `index`, whose own are `k` and `v`."""
        if self._buffers is None:
            self._buffers = self._empty(k), self._empty(v)
        for n in range(self._slices, index + 1):
            self._copy(n, (k, v) if n == index else bring(n))
        self._slices = max(self._slices, index + 1)
        keys, values = (buffer[:, :, : self._stops[index]] for buffer in self._buffers)
        return keys, values

    def clear(self) -> None:
        """Drop the buffers."""
        self._buffers, self._slices = None, 0

    def _empty(self, like: Tensor) -> Tensor:
        batch, heads, _, head_dim = like.shape
        return like.new_empty(batch, heads, self._stops[-1], head_dim)

    def _copy(self, n: int, keys_values: _KeysValues) -> None:
        assert self._buffers is not None
        start = self._stops[n - 1] if n else 0
        for buffer, part in zip(self._buffers, keys_values, strict=True):
            buffer[:, :, start : self._stops[n]] = part


def attend(backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Compute the attention of a module outside the engine's layers, or of a layer that runs as in plain training.

    Args:
        backend: The kernel.
        q: Queries, `[batch, heads, tokens, head_dim]`.
        k: Keys.
        v: Values.
        spec: The keys that each query sees.

    Returns:
        The output, `[batch, heads, tokens, head_dim]`, with autograd history.
    """
    out: Tensor = _WholeAttention.apply(backend, detached(spec), q, k, v, spec.sinks)
    return out


class _WholeAttention(torch.autograd.Function):
    """Attention of a complete sequence, differentiable."""

    @staticmethod
    def forward(
        ctx: Any, backend: AttentionBackend, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        result = merge_sinks(backend.forward(q, k, v, spec), sinks)
        ctx.backend, ctx.spec, ctx.state = backend, spec, result.state
        ctx.save_for_backward(q, k, v, result.out, result.lse, sinks)
        return result.out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        result = AttentionResult(out, lse, ctx.state)
        dsinks = gradient_of_sinks(dout, result, sinks) if ctx.needs_input_grad[5] else None
        return (None, None, *ctx.backend.backward(dout, q, k, v, result, ctx.spec), dsinks)


class StreamedAttention:
    """Causal attention slice by slice, without autograd; only two blocks of keys and values are on the device.

    The forward of a slice merges the results for its own keys and for each block of earlier keys by online softmax. The
    backward runs from the last slice to the first; for each slice it iterates over the blocks of earlier keys. The
    gradient of the queries stays on the device, and the gradients of keys and values are summed per slice. Blocks of
    which a slice sees no key are not fetched.

    Args:
        backend: A kernel that computes blocks.
        slices: The token ranges of the slices, in order.
        reader: Reads blocks of keys and values.
        host: Memory for the gradients of keys and values; `None` keeps them on the device.
        block_tokens: Number of tokens of a block; each block has at least one slice.
        ring: Number of processes that share each slice. Positions are the bounds of `slices` times this number.

    Attributes:
        slices_fetched: Number of slices whose keys and values were fetched so far.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        slices: Sequence[TokenRange],
        reader: BlockReader,
        host: SlotMemory | None,
        block_tokens: int,
        ring: int = 1,
    ) -> None:
        self._backend = backend
        self._slices = slices
        self._reader = reader
        self._host = host
        self._gradients: _DeviceGradients | HostGradients = _DeviceGradients()
        self._ring = ring
        self._blocks = blocks_of(slices, block_tokens)
        self._keys_values: dict[int, HostKeysValues] = {}
        self.slices_fetched = 0

    def hold(self, index: int, keys_values: HostKeysValues) -> None:
        """Register the keys and values of a slice for later slices."""
        self._keys_values[index] = keys_values

    def forward(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[AttentionResult, Tensor, Tensor]:
        """Compute the attention of slice `index`.

        Args:
            index: Number of the slice.
            q: Queries of the slice, `[batch, heads, tokens, head_dim]`.
            k: Keys of the slice.
            v: Values of the slice.
            spec: The keys that each query sees.

        Returns:
            The result, and the keys and values to pass to `hold` once they are stored.
        """
        start = self._slices[index].start
        past = self._past(index, spec)
        blocks = self._read(past)
        own = self._backend.forward(q, k, v, spec, start, start)
        if not past:
            return replace(own, state=[own.state]), k, v
        out, lse, states = own.out.to(sums_dtype(q)), own.lse, [own.state]
        for seen, block in blocks:
            keys, values = (heads_first(p, like, like.dtype) for p, like in zip(block.parts, (k, v), strict=True))
            part = self._backend.forward(q, keys, values, seen.spec, start, seen.start)
            merge(out, lse, part)
            states.append(part.state)
        return AttentionResult(out.to(q.dtype), lse, states), k, v

    def backward(
        self,
        index: int,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the slice's q, k and v, including the contributions of later slices.

        The backward of all later slices must have run before. `k` and `v` are those that `forward` returned.
        """
        if self._host is not None and not isinstance(self._gradients, HostGradients):
            self._gradients = HostGradients(self._host, [part.tokens for part in self._slices], k, v)
        start, states = self._slices[index].start, iter(result.state)
        later, blocks = self._read_with_gradients(index, self._past(index, spec))
        dq, dk, dv = self._backend.backward(dout, q, k, v, replace(result, state=next(states)), spec, start, start)
        dk, dv = later(dk, dv)
        dq = dq.to(sums_dtype(dq))
        for seen, block in blocks:
            keys, values = (heads_first(p, like, like.dtype) for p, like in zip(block.parts, (k, v), strict=False))
            part = replace(result, state=next(states))
            dq_part, *dkv = self._backend.backward(dout, q, keys, values, part, seen.spec, start, seen.start)
            dq += dq_part
            self._add(seen, block, *dkv)
        return dq.to(q.dtype), dk, dv

    def _past(self, index: int, spec: AttentionSpec) -> list[Past]:
        """Return the blocks of earlier slices of which slice `index` sees any key."""
        start, past = self._slices[index].start, []

        def is_seen(n: int) -> bool:
            return n < index and not spec.sees_nothing(start * self._ring, self._slices[n].stop * self._ring)

        for block in self._blocks:
            seen = [n for n in block if is_seen(n)]
            if seen:
                numbers = range(seen[0], seen[-1] + 1)
                # Keys in front of all queries need no causal mask, and kernels are fastest without it.
                visible = spec if spec.window is not None else replace(spec, causal=False)
                past.append(Past(numbers, self._slices[seen[0]].start, visible))
        return past

    def _read(self, past: Sequence[Past]) -> Blocks:
        return zip(past, self._reader.read([self._parts(seen) for seen in past]), strict=True)

    def _parts(self, seen: Past) -> BlockParts:
        self.slices_fetched += len(seen.slices)
        ranges = [self._keys_values[n].host_ranges() for n in seen.slices]
        return list(zip(*ranges, strict=True))

    def _read_with_gradients(self, index: int, past: Sequence[Past]) -> tuple[AddLater, Blocks]:
        sums = self._gradients
        if isinstance(sums, _DeviceGradients):
            return lambda dk, dv: sums.take(index, dk, dv), self._read(past)
        own = [sums.parts([index])] if index in sums else []
        blocks = self._reader.read(own + [[*self._parts(s), *sums.parts(s.slices)] for s in past])
        following = zip(past, blocks, strict=True)
        if not own:
            return lambda dk, dv: (dk, dv), following
        return lambda dk, dv: sums.take(next(blocks), dk, dv), following

    def _add(self, seen: Past, block: DeviceBlock, dk: Tensor, dv: Tensor) -> None:
        if isinstance(self._gradients, HostGradients):
            self._gradients.add(seen.slices, block, dk, dv)
            return
        lengths = [self._slices[n].tokens for n in seen.slices]
        for n, dk_part, dv_part in zip(seen.slices, dk.split(lengths, 2), dv.split(lengths, 2), strict=True):
            self._gradients.add(n, dk_part, dv_part)

    def rewind(self) -> None:
        """End a backward that another one may follow."""
        self.release()
        self._gradients = _DeviceGradients()

    def release(self) -> None:
        """End the layer's backward."""
        if isinstance(self._gradients, HostGradients):
            self._gradients.release()


class HostKeysValues(Protocol):
    """The keys and values of a slice on the host."""

    def host_ranges(self) -> tuple[HostRange, HostRange]:
        """Return the host ranges of the keys and of the values."""
        ...


@dataclass(frozen=True, slots=True)
class Past:
    """Consecutive slices in front of the query slice, to which one kernel call attends.

    Attributes:
        slices: Numbers of the slices.
        start: Position of their first key.
        spec: The keys that each query sees in them.
    """

    slices: range
    start: int
    spec: AttentionSpec


# Blocks of earlier slices, with the keys that the queries see in them.
Blocks = Iterator[tuple["Past", DeviceBlock]]
# Adds the contributions of later slices to the gradients of a slice's own keys and values.
AddLater = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class HostGradients:
    """Gradients of keys and values in a host buffer, which are read in blocks together with the keys and values.

    Like `_DeviceGradients`, they are in fp32 for half precision.

    Args:
        memory: Provides the host buffer and the copies to it.
        tokens: Number of tokens of each slice.
        k: Keys of a slice, `[batch, heads, tokens, head_dim]`.
        v: Values of a slice.
    """

    def __init__(self, memory: SlotMemory, tokens: Sequence[int], k: Tensor, v: Tensor) -> None:
        self._memory = memory
        self._tokens = list(tokens)
        self._dtype = sums_dtype(k)
        self._row_bytes = [t[:, :, 0].numel() * self._dtype.itemsize for t in (k, v)]
        self._buffer: HostBuffer | None = None
        self._written: dict[int, CopyEvent] = {}

    def parts(self, slices: Sequence[int]) -> list[list[HostRange]]:
        """Return the host ranges of consecutive slices: those of the key gradients and those of the value gradients."""
        return [[self._host_range(n, which) for n in slices] for which in (0, 1)]

    def add(self, slices: Sequence[int], block: DeviceBlock, dk: Tensor, dv: Tensor) -> None:
        """Add contributions to the gradients in a block, and start copying them back to the host.

        Args:
            slices: The slices of the block.
            block: The block that was read; its last two parts are those that `parts` returned.
            dk: Contribution to the gradients of the keys, `[batch, heads, tokens, head_dim]`.
            dv: Contribution to the gradients of the values.
        """
        if self._buffer is None:
            size_bytes = sum(self._tokens) * sum(self._row_bytes)
            self._buffer = self._memory.take_host_buffer(size_bytes, self._memory.gradients)
        for which, (part, gradient) in enumerate(zip(block.parts[-2:], (dk, dv), strict=True)):
            heads_first(part, gradient, self._dtype).add_(gradient)
            block.leaving = self._buffer.write(part, self._start(slices[0], which))
        assert block.leaving is not None
        self._written |= dict.fromkeys(slices, block.leaving)

    def take(self, block: DeviceBlock, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a slice: those in the block that was read plus its own contributions."""
        sums = []
        for part, own in zip(block.parts, (dk, dv), strict=True):
            sums.append((heads_first(part, own, self._dtype) + own).to(own.dtype))
        return sums[0], sums[1]

    def __contains__(self, index: int) -> bool:
        """Return whether a later slice has added to the gradients of slice `index`."""
        return index in self._written

    def release(self) -> None:
        """Release the host buffer, after all gradients have been read."""
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None

    def _host_range(self, index: int, which: int) -> HostRange:
        size, written = self._tokens[index] * self._row_bytes[which], self._written.get(index)
        if self._buffer is None or written is None:
            return HostRange(size, None)
        return self._buffer.range(self._start(index, which), size, written)

    def _start(self, index: int, which: int) -> int:
        """Return the offset of a slice's gradients in bytes: those of all keys come first, then those of all values."""
        before = sum(self._tokens) * sum(self._row_bytes[:which])
        return before + sum(self._tokens[:index]) * self._row_bytes[which]


class StreamedUlysses:
    """Streamed attention with Ulysses context parallelism (FPDT, figure 6).

    Each process holds a contiguous part of every slice, and computes some of the heads for the tokens of all processes.
    The keys and values that it stores are those it computes with.

    Args:
        exchange: All-to-all exchange between tokens and heads.
        inner: Streamed attention over the slices of all processes of the group.
    """

    def __init__(self, exchange: HeadExchange, inner: StreamedAttention) -> None:
        self._exchange = exchange
        self._inner = inner
        self._copies = 1
        self.hold, self.rewind, self.release = inner.hold, inner.rewind, inner.release

    def forward(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[AttentionResult, Tensor, Tensor]:
        """Compute the attention of this process's tokens of slice `index`; see :meth:`StreamedAttention.forward`.

        Returns:
            The result for this process's tokens, and the keys and values of some heads for all tokens, for `hold`.

        Raises:
            ValueError: The number of heads is not divisible by the number of processes.
        """
        self._copies = self._exchange.copies(q, k)
        k, v = repeat_heads(k, self._copies), repeat_heads(v, self._copies)
        result, k, v = self._inner.forward(index, *self._exchange.to_heads(q, k, v), spec)
        return self._exchange.result_to_tokens(result, spec), k, v

    def backward(
        self,
        index: int,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this process's q, k and v; `k` and `v` are those that `forward` returned."""
        dout, q, out = self._exchange.to_heads(dout, q, result.out)
        result = self._exchange.result_to_heads(result, out, spec)
        gradients = self._inner.backward(index, dout, q, k, v, result, spec)
        dq, dk, dv = self._exchange.to_tokens(*gradients)
        return dq, sum_head_groups(dk, self._copies), sum_head_groups(dv, self._copies)
