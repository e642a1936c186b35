"""One memory planner at a time: PyTorch has one allocator in a process, and phases of two trainings would mix in it."""

from __future__ import annotations

import weakref

_planning: weakref.ref[object] | None = None


def begin_planning(planner: object) -> None:
    """Let a planner use the allocator of the process until `end_planning`.

    Raises:
        RuntimeError: Another one uses it.
    """
    global _planning
    other = None if _planning is None else _planning()
    if other is not None and other is not planner:
        raise RuntimeError("another training of this process, which has not ended, plans its memory")
    _planning = weakref.ref(planner)


def end_planning(planner: object) -> None:
    """Leave the allocator to other planners."""
    global _planning
    if _planning is not None and _planning() is planner:
        _planning = None
