"""The planned allocator: PyTorch's allocator, with a place known ahead for each buffer of a training step."""

from lightning_memo.allocator.allocator_library import EVENT, FREE, MALLOC
from lightning_memo.allocator.planned_allocator import AllocatorStats, PlannedAllocator

__all__ = ["EVENT", "FREE", "MALLOC", "AllocatorStats", "PlannedAllocator"]
