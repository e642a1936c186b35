"""The planned allocator: PyTorch's allocator, with a place known ahead for each buffer of a training step."""

from lightning_memo.allocator.library import EVENT, FREE, MALLOC
from lightning_memo.allocator.planned import AllocatorStats, PlannedAllocator

__all__ = ["EVENT", "FREE", "MALLOC", "AllocatorStats", "PlannedAllocator"]
