"""Gradients of keys and values while later slices still add to them, in fp32 for half precision."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyEvent
from lightning_memo.engine.memory.block_reader import DeviceBlock, Region, heads_first
from lightning_memo.engine.memory.host_arena import HostRoom
from lightning_memo.engine.memory.restored_checks import Check, What
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.kernels.attention_kernel import sums_dtype


class DeviceGradients:
    """They stay on the device."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, index: int, dk: Tensor, dv: Tensor) -> None:
        """Add a later slice's share of the gradients of slice `index`, `[batch, heads, tokens, head_dim]`."""
        if index not in self._sums:
            self._sums[index] = (dk.to(sums_dtype(dk), copy=True), dv.to(sums_dtype(dv), copy=True))
            return
        for total, part in zip(self._sums[index], (dk, dv), strict=True):
            total += part

    def take(self, index: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of slice `index`, its own share `dk`, `dv` included."""
        if index not in self._sums:
            return dk, dv
        later_dk, later_dv = self._sums.pop(index)
        return (later_dk + dk).to(dk.dtype), (later_dv + dv).to(dv.dtype)


class HostGradients:
    """They live on the host, token by token, and pass the device behind the keys and values of their slices.

    Args:
        memory: Gives room on the host, and the stream that writes there.
        tokens: Tokens of each slice.
        k: Keys of a slice, `[batch, heads, tokens, head_dim]`.
        v: Its values.
        layer: Whose they are.
    """

    def __init__(self, memory: SlotMemory, tokens: Sequence[int], k: Tensor, v: Tensor, layer: int) -> None:
        self._memory, self._layer = memory, layer
        self._tokens = list(tokens)
        self._dtype = sums_dtype(k)
        self._row_bytes = [t[:, :, 0].numel() * self._dtype.itemsize for t in (k, v)]
        self._room: HostRoom | None = None
        self._written: dict[int, CopyEvent] = {}
        self._checks: dict[tuple[int, int], Check] = {}  # by slice, keys and values apart

    def parts(self, slices: Sequence[int]) -> list[list[Region]]:
        """What is to be read of some slices that follow each other: the gradients of keys, and those of values."""
        return [[self._region(n, which) for n in slices] for which in (0, 1)]

    def add(self, slices: Sequence[int], block: DeviceBlock, dk: Tensor, dv: Tensor) -> None:
        """Add to what was read, and write it back.

        Args:
            slices: As read.
            block: What was read, its last two parts being what `parts` named.
            dk: To be added, `[batch, heads, tokens, head_dim]`.
            dv: To be added.
        """
        if self._room is None:
            self._room = self._memory.take_room(sum(self._tokens) * sum(self._row_bytes), self._memory.gradient_arena)
        for which, (part, gradient) in enumerate(zip(block.parts[-2:], (dk, dv), strict=True)):
            heads_first(part, gradient, self._dtype).add_(gradient)
            if self._memory.check_restored:
                self._note(slices, which, part)
            block.leaving = self._memory.write_host(self._room, self._start(slices[0], which), part)
        assert block.leaving is not None
        self._written |= dict.fromkeys(slices, block.leaving)

    def take(self, block: DeviceBlock, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of a slice, its own share included, from what was read."""
        sums = []
        for part, own in zip(block.parts, (dk, dv), strict=True):
            sums.append((heads_first(part, own, self._dtype) + own).to(own.dtype))
        return sums[0], sums[1]

    def __contains__(self, index: int) -> bool:
        """Whether a later slice has added to the gradients of slice `index`."""
        return index in self._written

    def release(self) -> None:
        """Give the room back; all that was written has been read."""
        if self._room is not None:
            self._room.release()
            self._room = None

    def _region(self, index: int, which: int) -> Region:
        size, written = self._tokens[index] * self._row_bytes[which], self._written.get(index)
        if self._room is None or written is None:
            return Region(size, None)
        start = self._start(index, which)
        check = self._checks.get((index, which))
        return Region(size, self._room.memory[start : start + size], written, self._room, check)

    def _note(self, slices: Sequence[int], which: int, part: Tensor) -> None:
        kind = ("key gradient", "value gradient")[which]
        for n, data in zip(slices, part.split([self._tokens[n] * self._row_bytes[which] for n in slices]), strict=True):
            start = sum(self._tokens[:n])
            what = What(kind, self._layer, start, start + self._tokens[n])
            self._checks[n, which] = Check(what, data, self._dtype)

    def _start(self, index: int, which: int) -> int:
        """Where the gradients of a slice begin: those of all keys come first, then those of all values."""
        before = sum(self._tokens) * sum(self._row_bytes[:which])
        return before + sum(self._tokens[:index]) * self._row_bytes[which]
