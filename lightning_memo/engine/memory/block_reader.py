"""Double-buffered reading: the next block is copied to the device while the current one is used by the computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_memo.engine.copy_streams import CopyEvent, CopyStream
from lightning_memo.engine.memory.host import HostRange
from lightning_memo.engine.memory.saved_storages import POISON
from lightning_memo.planner.token_slices import aligned

# The parts of a block. The ranges of a part follow each other on the device; every part starts at an aligned offset.
BlockParts = Sequence[Sequence[HostRange]]


@dataclass(slots=True, eq=False)
class DeviceBlock:
    """A block on the device, valid until the next block is requested from `BlockReader.read`.

    Attributes:
        parts: The parts of the block, uint8.
        arrivals: Ends of the copies to the device.
        leaving: End of the copy of a changed block back to the host.
    """

    parts: list[Tensor]
    arrivals: list[CopyEvent] = field(default_factory=list)
    leaving: CopyEvent | None = None


class BlockReader:
    """Device buffers that receive blocks in turn.

    Args:
        device: Device of the buffers.
        prefetch: The copy stream that copies blocks to the device.
        buffers: Number of buffers: one is in use while the next is filled; a third is needed where blocks are also
            copied back.
        poison: Whether a buffer is filled with NaN before it is used again.
        size_bytes: Total size of the buffers. A buffer grows when a block is larger.
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

    @property
    def size_bytes(self) -> int:
        """Total size of the device buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def read(self, blocks: Sequence[BlockParts]) -> Iterator[DeviceBlock]:
        """Iterate over blocks in order.

        The copy of the first block has been started when this returns, and each further copy is started before the
        block in front of it is returned. A block is valid until the next one is requested. A caller that changes a
        block and copies it back sets `leaving` before it requests the next one.
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
            yield block
            self._leaving[buffer] = block.leaving

    def _start(self, parts: BlockParts) -> tuple[int, DeviceBlock]:
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        block = DeviceBlock(self._views(number, [sum(source.size_bytes for source in part) for part in parts]))
        for part, sources in zip(block.parts, parts, strict=True):
            for piece, source in zip(part.split([s.size_bytes for s in sources]), sources, strict=True):
                self._copy(block, piece, source)
        return number, block

    def _copy(self, block: DeviceBlock, piece: Tensor, source: HostRange) -> None:
        arrival = source.read(piece, self._prefetch)
        if arrival is not None:
            block.arrivals.append(arrival)

    def _views(self, number: int, sizes: list[int]) -> list[Tensor]:
        leaving, self._leaving[number] = self._leaving[number], None
        if leaving is not None:
            leaving.wait()
        needed = sum(aligned(size) for size in sizes)
        if self._buffers[number].nbytes < needed:
            self._buffers[number] = self._buffers[number].new_empty(needed)
        if self._poison:
            self._buffers[number].fill_(POISON)
        parts = self._buffers[number][:needed].split([aligned(size) for size in sizes])
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def token_rows(t: Tensor) -> Tensor:
    """Copy `t` `[batch, heads, tokens, head_dim]` to `[tokens, batch, heads, head_dim]`.

    Token ranges that follow each other are then contiguous and can be joined.
    """
    return t.permute(2, 0, 1, 3).contiguous()


def heads_first(part: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """View a part of a block that holds `token_rows` as `[batch, heads, tokens, head_dim]`.

    Args:
        part: The bytes, uint8.
        like: A tensor `[batch, heads, any, head_dim]` with the same number of heads and the same head size.
        dtype: Data type of the part.
    """
    batch, heads, _, size = like.shape
    return part.view(dtype).view(-1, batch, heads, size).permute(1, 2, 0, 3)
