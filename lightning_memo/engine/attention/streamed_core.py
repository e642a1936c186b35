"""Attention over slices whose keys and values are on the host (FPDT, section 4.2): they pass the device in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_memo.engine.attention.key_value_gradients import DeviceGradients, HostGradients
from lightning_memo.engine.memory.block_reader import BlockParts, BlockReader, DeviceBlock, heads_first
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.saved.offload_group import KeysValues
from lightning_memo.kernels import AttentionBackend, AttentionResult, AttentionSpec
from lightning_memo.kernels.attention_kernel import merge, repeat_heads, sum_head_groups, sums_dtype
from lightning_memo.parallel.context.ulysses_attention import HeadExchange
from lightning_memo.planner.alpha.streamed_sizes import blocks_of
from lightning_memo.planner.token_slices import TokenRange

# Blocks of the past that were read, with what the queries see of them.
Blocks = Iterator[tuple["Past", DeviceBlock]]
# Adds the share of later slices to the gradients of a slice's own keys and values.
AddLater = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Past:
    """Slices `first .. last` that precede a query slice: what one kernel call meets.

    Attributes:
        slices: Their numbers, one after the other.
        start: Position of their first key.
        spec: What the queries see of them.
    """

    slices: range
    start: int
    spec: AttentionSpec


class StreamedAttention:
    """Causal attention of slice after slice, without autograd; only two blocks of keys and values are on the device.

    The forward of a slice merges the results of its own keys and of each block of earlier ones by online softmax. Its
    backward, last slice first, has queries outside and keys inside: the gradient of the queries stays on the device,
    those of keys and values are added up per slice. Blocks that a slice sees nothing of are not fetched.

    Args:
        backend: A kernel that computes blocks.
        slices: The token ranges, in order.
        reader: Brings blocks of keys and values.
        host: Where the gradients of keys and values meet; `None`: on the device.
        block_tokens: Tokens of a block; at least one slice goes into each.
        ring: Processes over which each slice is divided: positions are so many times those of `slices`.
        layer: Position of the layer.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        slices: Sequence[TokenRange],
        reader: BlockReader,
        host: SlotMemory | None,
        block_tokens: int,
        ring: int = 1,
        layer: int = 0,
    ) -> None:
        self._backend = backend
        self._slices = slices
        self._reader = reader
        self._host = host
        self._gradients: DeviceGradients | HostGradients = DeviceGradients()
        self._ring, self._layer = ring, layer
        self._blocks = blocks_of(slices, block_tokens)
        self._keys_values: dict[int, KeysValues] = {}
        self.slices_fetched = 0

    def hold(self, index: int, keys_values: KeysValues) -> None:
        """Where later slices find the keys and values of a slice."""
        self._keys_values[index] = keys_values

    def forward(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[AttentionResult, Tensor, Tensor]:
        """Attention of slice `index`, whose q, k, v `[batch, heads, tokens, head_dim]` are given.

        Returns:
            The result, and the keys and values that `hold` is to find.
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
        """Gradients of the slice's q, k, v, later slices' share included: those must have run before.

        Keys and values are as `forward` gave them back.
        """
        if self._host is not None and not isinstance(self._gradients, HostGradients):
            self._gradients = HostGradients(self._host, [part.tokens for part in self._slices], k, v, self._layer)
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
        """The blocks of earlier slices of which slice `index` sees any key."""
        start, past = self._slices[index].start, []

        def is_seen(n: int) -> bool:
            return n < index and not spec.sees_nothing(start * self._ring, self._slices[n].stop * self._ring)

        for block in self._blocks:
            seen = [n for n in block if is_seen(n)]
            if seen:
                numbers = range(seen[0], seen[-1] + 1)
                # Keys before all queries need no causal mask; without it kernels are at their fastest.
                visible = spec if spec.window is not None else replace(spec, causal=False)
                past.append(Past(numbers, self._slices[seen[0]].start, visible))
        return past

    def _read(self, past: Sequence[Past]) -> Blocks:
        return zip(past, self._reader.read([self._parts(seen) for seen in past]), strict=True)

    def _parts(self, seen: Past) -> BlockParts:
        self.slices_fetched += len(seen.slices)
        regions = [self._keys_values[n].regions() for n in seen.slices]
        return list(zip(*regions, strict=True))

    def _read_with_gradients(self, index: int, past: Sequence[Past]) -> tuple[AddLater, Blocks]:
        sums = self._gradients
        if isinstance(sums, DeviceGradients):
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

    def release(self) -> None:
        """The layer's backward is over."""
        if isinstance(self._gradients, HostGradients):
            self._gradients.release()


class UlyssesCore:
    """Streamed attention of some heads over the tokens of a group, slice by slice (FPDT, figure 6).

    Each process holds a contiguous part of every slice. What is stored of keys and values is what it computes with:
    some heads of all processes' tokens.

    Args:
        exchange: Exchanges heads for tokens.
        inner: Attention over the slices of the whole group.
    """

    def __init__(self, exchange: HeadExchange, inner: StreamedAttention) -> None:
        self._exchange = exchange
        self._inner = inner
        self._copies = 1
        self.hold, self.release = inner.hold, inner.release

    def forward(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[AttentionResult, Tensor, Tensor]:
        """As of the inner attention; q, k, v are of the own tokens, what is to be held is of some heads.

        Raises:
            ValueError: Heads that do not divide by the number of processes.
        """
        self._copies = self._exchange.copies(q, k)
        k, v = repeat_heads(k, self._copies), repeat_heads(v, self._copies)
        result, k, v = self._inner.forward(index, *self._exchange.to_heads(q, k, v), spec)
        (out,) = self._exchange.to_tokens(result.out)
        return replace(result, out=out), k, v

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
        """Gradients of the own q, k, v; `k` and `v` are what was held."""
        dout, q, out = self._exchange.to_heads(dout, q, result.out)
        gradients = self._inner.backward(index, dout, q, k, v, replace(result, out=out), spec)
        dq, dk, dv = self._exchange.to_tokens(*gradients)
        return dq, sum_head_groups(dk, self._copies), sum_head_groups(dv, self._copies)
