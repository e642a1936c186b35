"""Brings blocks from the host to the device one after the other, the next while the present one is computed with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyEvent
from lightning_memo.engine.copies.copy_streams import CopyStream
from lightning_memo.engine.memory.saved_storages import POISON
from lightning_memo.planner.token_slices import aligned

if TYPE_CHECKING:
    from lightning_memo.engine.memory.host_arena import HostRoom
    from lightning_memo.engine.memory.restored_checks import Check


@dataclass(slots=True)
class Region:
    """Bytes to be read, uint8 `[size_bytes]` on the host, and the last copy to them; without bytes, zeros are read."""

    size_bytes: int
    memory: Tensor | None
    written: CopyEvent | None = None
    room: HostRoom | None = None  # whose owner may drop it while it is read
    check: Check | None = None  # what the bytes were when they left


# Regions that lie side by side on the device, part after part; every part begins at an aligned place.
BlockParts = Sequence[Sequence[Region]]


@dataclass(slots=True, eq=False)
class DeviceBlock:
    """A block on the device: its parts, uint8 each; in use until it is handed back by `BlockReader.read`."""

    parts: list[Tensor]
    arrivals: list[CopyEvent] = field(default_factory=list)
    checks: list[tuple[Check, Tensor]] = field(default_factory=list)  # each with its bytes
    leaving: CopyEvent | None = None  # the copy of what was changed in it back to the host


class BlockReader:
    """Device buffers that blocks pass through in turns.

    Args:
        device: Where they are.
        prefetch: The stream that brings blocks.
        buffers: How many: one is computed with, one arrives; a third where blocks are also written back.
        poison: Whether a buffer is filled with NaN before it is used again.
        size_bytes: Of all of them; they grow where a block turns out larger.
    """

    def __init__(
        self, device: torch.device, prefetch: CopyStream, buffers: int, poison: bool, size_bytes: int = 0
    ) -> None:
        self._prefetch = prefetch
        self._poison = poison
        each = size_bytes // buffers
        self._buffers = [torch.empty(each, dtype=torch.uint8, device=device) for _ in range(buffers)]
        self._leaving: list[CopyEvent | None] = [None] * buffers
        self._next = 0
        self.blocks_read = 0
        self.bytes_read = 0

    @property
    def size_bytes(self) -> int:
        """Device memory that the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def read(self, blocks: Sequence[BlockParts]) -> Iterator[DeviceBlock]:
        """Blocks in order; the first is on its way when this returns, and each follows while the one before is used.

        A block is over when the next one is asked for. If it was changed, and is copied back, `leaving` is set by then.
        """
        return self._hand_out(blocks, self._start(blocks[0]) if blocks else None)

    def _hand_out(
        self, blocks: Sequence[BlockParts], following: tuple[int, DeviceBlock] | None
    ) -> Iterator[DeviceBlock]:
        for number in range(len(blocks)):
            assert following is not None
            buffer, block = following
            following = self._start(blocks[number + 1]) if number + 1 < len(blocks) else None
            for event in block.arrivals:
                event.wait()
            for check, data in block.checks:
                check.compare(data)
            yield block
            self._leaving[buffer] = block.leaving

    def _start(self, parts: BlockParts) -> tuple[int, DeviceBlock]:
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        block = DeviceBlock(self._views(number, [sum(region.size_bytes for region in part) for part in parts]))
        for place, regions in zip(block.parts, parts, strict=True):
            pieces = place.split([region.size_bytes for region in regions])
            for piece, region in zip(pieces, regions, strict=True):
                if region.memory is None:
                    piece.zero_()
                else:
                    block.arrivals.append(self._prefetch.copy(piece, region.memory, region.written))
                    if region.room is not None:
                        region.room.copies.read = block.arrivals[-1]
                    self.bytes_read += region.size_bytes
                    if region.check is not None:
                        block.checks.append((region.check, piece))
        self.blocks_read += 1
        return number, block

    def _views(self, number: int, sizes: list[int]) -> list[Tensor]:
        leaving, self._leaving[number] = self._leaving[number], None
        if leaving is not None:
            leaving.wait()
        needed = sum(aligned(size) for size in sizes)
        if self._buffers[number].nbytes < needed:
            self._buffers[number] = self._buffers[number].new_empty(needed)
        if self._poison:
            self._buffers[number].fill_(POISON)
        places = self._buffers[number][:needed].split([aligned(size) for size in sizes])
        return [place[:size] for place, size in zip(places, sizes, strict=True)]


def token_rows(t: Tensor) -> Tensor:
    """`t` `[batch, heads, tokens, head_dim]` as `[tokens, batch, heads, head_dim]`: ranges of tokens can be joined."""
    return t.permute(2, 0, 1, 3).contiguous()


def heads_first(part: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A part of a block that holds `token_rows`, as `[batch, heads, tokens, head_dim]`; all but `tokens` as `like`."""
    batch, heads, _, size = like.shape
    return part.view(dtype).view(-1, batch, heads, size).permute(1, 2, 0, 3)
