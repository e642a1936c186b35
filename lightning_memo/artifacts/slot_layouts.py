"""Bytes of slots on a disk, in blocks of its sectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK_BYTES: Final = 4096  # unit of direct I/O: offsets, sizes and addresses are multiples of it
_CHUNK_BYTES: Final = 8 * 2**20  # large enough for the full bandwidth of a disk
_LEAST_CHUNKS: Final = 4  # per slot: with fewer, the bounce buffers of a small slot would be much larger than the slot


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """Sizes of the file region and the bounce buffers of a slot.

    A slot passes through bounce buffers in host memory in chunks. The write buffers hold a whole slot, so that it can
    leave the device at the bandwidth of the copy, and the disk may write until the next slot arrives. There are two
    read buffers: one is filled from the disk while the other is copied to the device.

    Attributes:
        slot_bytes: Bytes of the slot.
        read_buffers: Number of read buffers.
    """

    slot_bytes: int
    read_buffers = 2

    @property
    def region_bytes(self) -> int:
        """Bytes of the slot's region in the file."""
        return whole_blocks(self.slot_bytes)

    @property
    def chunk_bytes(self) -> int:
        return min(whole_blocks(-(-self.region_bytes // _LEAST_CHUNKS)), _CHUNK_BYTES)

    @property
    def write_buffers(self) -> int:
        return max(-(-self.region_bytes // max(self.chunk_bytes, 1)), 2)

    @property
    def bounce_bytes(self) -> int:
        """Host bytes of all bounce buffers."""
        return (self.write_buffers + self.read_buffers) * self.chunk_bytes


def whole_blocks(size_bytes: int) -> int:
    """Round a size up to whole blocks of direct I/O."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
