"""Events that mark the end of copies; a consumer of the copied bytes waits for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from lightning_memo.engine.copies.timeline_recorder import TimelineRecorder


class CopyError(RuntimeError):
    """A copy between device and host failed."""


class CopyEvent(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Make the compute stream wait for the copy. On a CPU, block until it has ended.

        Raises:
            CopyError: The copy, or one that it waited for, failed.
        """
        ...

    def synchronize(self) -> None:
        """Block until the copy has ended."""
        ...


class LaterEvent:
    """The end of copies that another thread is going to start.

    Args:
        stream: Name of the copy stream, for the recorder.
        recorder: Records the computation's waits.
    """

    def __init__(self, stream: str, recorder: TimelineRecorder) -> None:
        self._started = threading.Event()
        self._stream, self._recorder = stream, recorder
        self._copy: CopyEvent | None = None
        self._error: BaseException | None = None

    def start(self, copy: CopyEvent | None) -> None:
        """Announce that all copies have been submitted.

        Args:
            copy: End of the last one; `None` if all have ended.
        """
        self._copy = copy
        self._started.set()

    def fail(self, error: BaseException) -> None:
        """Announce that the copies failed; `error` is raised where they are waited for."""
        self._error = error
        self._started.set()

    def wait(self) -> None:
        with self._recorder.waiting(self._stream):
            copy = self.when_started()
            if copy is not None:
                copy.wait()

    def synchronize(self) -> None:
        copy = self.when_started()
        if copy is not None:
            copy.synchronize()

    def when_started(self) -> CopyEvent | None:
        """Block until the other thread has started the last copy, and return its end.

        Raises:
            Exception: The error that kept the thread from starting it.
        """
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self._copy


class AllOf:
    """The end of all of several copies.

    Attributes:
        events: The ends of the copies.
    """

    def __init__(self, events: Sequence[CopyEvent]) -> None:
        self.events = events

    def wait(self) -> None:
        for event in self.events:
            event.wait()

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()
