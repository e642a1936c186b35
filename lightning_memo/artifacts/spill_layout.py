"""Sizes of what goes to a file on a disk. Pure: imports neither torch nor Lightning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK_BYTES: Final = 4096  # what direct I/O moves: offsets, sizes and addresses are multiples of it
_CHUNK_BYTES: Final = 8 * 2**20  # large enough for the full speed of a disk
_LEAST_CHUNKS: Final = 4  # of a slot: few in small ones would make bounce buffers much larger than a slot


@dataclass(frozen=True, slots=True)
class SpillLayout:
    """Sizes for slots of `slot_bytes`.

    A slot passes through bounce buffers on the host in chunks. Going out there are buffers for a whole slot: it leaves
    the device at the speed of the copy, and the disk has until the next slot. Coming back there are two: one is read
    into while the other is copied.
    """

    slot_bytes: int
    read_buffers = 2

    @property
    def region_bytes(self) -> int:
        """What a slot takes in the file."""
        return whole_blocks(self.slot_bytes)

    @property
    def chunk_bytes(self) -> int:
        return min(whole_blocks(-(-self.region_bytes // _LEAST_CHUNKS)), _CHUNK_BYTES)

    @property
    def write_buffers(self) -> int:
        return max(-(-self.region_bytes // max(self.chunk_bytes, 1)), 2)

    @property
    def bounce_bytes(self) -> int:
        """Host memory of all bounce buffers."""
        return (self.write_buffers + self.read_buffers) * self.chunk_bytes


def whole_blocks(size_bytes: int) -> int:
    """`size_bytes` rounded up to what direct I/O moves."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
