"""Copies on a CPU, where device and host are both main memory: a thread follows the rules of a CUDA stream.

The rest of the engine can therefore be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyError, CopyEvent, LaterEvent
from lightning_memo.engine.copies.test_mode import Delays
from lightning_memo.engine.copies.timeline_recorder import Subject, TimelineRecorder


class ThreadCopyEvent:
    """The end of a copy in a thread.

    Attributes:
        error: The error of a copy that failed.
    """

    def __init__(self, stream: str, recorder: TimelineRecorder) -> None:
        self._done = threading.Event()
        self._stream, self._recorder = stream, recorder
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Announce the end of the copy."""
        self.error = error
        self._done.set()

    def wait(self) -> None:
        with self._recorder.waiting(self._stream):
            self.synchronize()

    def synchronize(self) -> None:
        self._done.wait()
        if isinstance(self.error, CopyError):
            raise CopyError(str(self.error)) from self.error
        if self.error is not None:
            raise CopyError(f"a copy between device and host failed: {self.error}; run the step again") from self.error


class _ThreadCopy(NamedTuple):
    destination: Tensor
    source: Tensor
    after: tuple[CopyEvent | None, ...]
    subject: Subject
    event: ThreadCopyEvent


class ThreadCopyStream:
    """A copy stream on a CPU; see :class:`CopyStream`.

    One thread copies with `memmove`, which uses one core and does not need Python's global interpreter lock.
    """

    def __init__(self, name: str, delays: Delays | None = None, recorder: TimelineRecorder | None = None) -> None:
        self._name, self._delays = name, delays
        self._recorder = recorder or TimelineRecorder(torch.device("cpu"))
        self._jobs: queue.SimpleQueue[_ThreadCopy | None] = queue.SimpleQueue()
        self._last: ThreadCopyEvent | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def copy(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        return self.copy_after(destination, source, *after, subject=subject)

    def computed(self) -> CopyEvent | None:
        return None

    def copy_after(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        if not self._thread.is_alive():
            raise CopyError(
                "a copy was asked for after the memory of its step was freed: run each backward in its step"
            )
        self._last = event = ThreadCopyEvent(self._name, self._recorder)
        self._jobs.put(_ThreadCopy(destination, source, after, subject or self._recorder.subject, event))
        return event

    def later(self) -> LaterEvent:
        return LaterEvent(self._name, self._recorder)

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.synchronize()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            event = job.event
            error: BaseException | None = None
            try:
                for before in job.after:
                    if before is not None:
                        before.synchronize()
                with self._recorder.copying(self._name, job.source.nbytes, job.subject):
                    if self._delays is not None:
                        time.sleep(self._delays.seconds())
                    ctypes.memmove(job.destination.data_ptr(), job.source.data_ptr(), job.source.nbytes)
            except BaseException as raised:  # raised where the copy is waited for
                error = raised
            # The references are dropped before the event, because a waiting test may measure memory. Otherwise the
            # tensors of the last job would stay alive until the next one.
            del job
            event.finish(error)
            del event, error
