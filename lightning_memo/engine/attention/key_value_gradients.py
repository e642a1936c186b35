"""Gradients of keys and values, to which later slices add their contributions; in fp32 for half precision."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyEvent
from lightning_memo.engine.memory.block_reader import DeviceBlock, HostRange, heads_first
from lightning_memo.engine.memory.checksums import Checksum, TensorLabel
from lightning_memo.engine.memory.host_arena import HostBuffer
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.kernels.attention_kernel import sums_dtype


class DeviceGradients:
    """Gradients of keys and values that stay on the device."""

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


class HostGradients:
    """Gradients of keys and values in a host buffer, which are read in blocks together with the keys and values.

    Args:
        memory: Provides the host buffer and the copies to it.
        tokens: Number of tokens of each slice.
        k: Keys of a slice, `[batch, heads, tokens, head_dim]`.
        v: Values of a slice.
        layer: Position of the layer.
    """

    def __init__(self, memory: SlotMemory, tokens: Sequence[int], k: Tensor, v: Tensor, layer: int) -> None:
        self._memory, self._layer = memory, layer
        self._tokens = list(tokens)
        self._dtype = sums_dtype(k)
        self._row_bytes = [t[:, :, 0].numel() * self._dtype.itemsize for t in (k, v)]
        self._buffer: HostBuffer | None = None
        self._written: dict[int, CopyEvent] = {}
        self._checksums: dict[tuple[int, int], Checksum] = {}  # by slice, and 0 for keys or 1 for values

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
            self._buffer = self._memory.take_host_buffer(
                sum(self._tokens) * sum(self._row_bytes), self._memory.gradient_arena
            )
        for which, (part, gradient) in enumerate(zip(block.parts[-2:], (dk, dv), strict=True)):
            heads_first(part, gradient, self._dtype).add_(gradient)
            if self._memory.check_restored:
                self._note(slices, which, part)
            block.leaving = self._memory.copy_to_host(self._buffer, self._start(slices[0], which), part)
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
        start = self._start(index, which)
        checksum = self._checksums.get((index, which))
        return HostRange(size, self._buffer.memory[start : start + size], written, self._buffer.copies, checksum)

    def _note(self, slices: Sequence[int], which: int, part: Tensor) -> None:
        kind = ("key gradient", "value gradient")[which]
        for n, data in zip(slices, part.split([self._tokens[n] * self._row_bytes[which] for n in slices]), strict=True):
            start = sum(self._tokens[:n])
            label = TensorLabel(kind, self._layer, start, start + self._tokens[n])
            self._checksums[n, which] = Checksum(label, data, self._dtype)

    def _start(self, index: int, which: int) -> int:
        """Return the offset of a slice's gradients in bytes: those of all keys come first, then those of all values."""
        before = sum(self._tokens) * sum(self._row_bytes[:which])
        return before + sum(self._tokens[:index]) * self._row_bytes[which]
