"""The planned allocator, which serves each memory request of a training step at an offset planned in advance."""

from lightning_memo.allocator.planned_allocator import EVENT, FREE, MALLOC, AllocatorStats, PlannedAllocator

__all__ = ["EVENT", "FREE", "MALLOC", "AllocatorStats", "PlannedAllocator"]
