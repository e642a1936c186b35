"""One memory planner at a time: PyTorch has one allocator in a process, and phases of two trainings would mix in it."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple, Protocol

_lock = threading.Lock()


class Planner(Protocol):
    """A memory planner."""

    def yield_allocator(self) -> None:
        """Leave the allocator to other planners, until the next step of its training."""


class _Owner(NamedTuple):
    """The planner that uses the allocator, and the thread of its training."""

    planner: weakref.ref[Planner]
    thread: threading.Thread


_owner: _Owner | None = None


def begin_planning(planner: Planner) -> None:
    """Let a planner use the allocator of the process until `end_planning`.

    Raises:
        RuntimeError: Another one uses it.
    """
    global _owner
    with _lock:
        other = None if _owner is None else _owner.planner()
        if other is not None and other is not planner:
            raise RuntimeError("another training of this process, which has not ended, plans its memory")
        _owner = _Owner(weakref.ref(planner), threading.current_thread())


def end_planning(planner: Planner) -> None:
    """Leave the allocator to other planners."""
    global _owner
    with _lock:
        if _owner is not None and _owner.planner() is planner:
            _owner = None


def interrupt_planning() -> None:
    """Let the planner of an earlier training of this thread, or of a thread that has ended, leave the allocator.

    A training that has failed may never tell of its end: the Trainer of Hugging Face has no hook for it.
    """
    owner = _owner
    planner = None if owner is None else owner.planner()
    if owner is None or planner is None:
        return
    if owner.thread is threading.current_thread() or not owner.thread.is_alive():
        planner.yield_allocator()
