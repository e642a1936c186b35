"""Asynchronous copies between device and host: copy streams, the events that mark ends of copies, and their test mode.

A CUDA stream copies beside the computation. On a CPU, where device and host are both main memory, a thread follows the
rules of a CUDA stream, so that the rest of the engine can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_memo.engine.timeline_recorder import Subject, TimelineRecorder

_CYCLES_PER_SECOND = 2e9  # approximately; the length of a delay need not be exact
_HIGH = -1  # with high priority, a copy that is ready does not wait for thread blocks of a kernel that are not


def make_copy_stream(
    device: torch.device, name: str, delays: Delays | None = None, recorder: TimelineRecorder | None = None
) -> CopyStream:
    """Create a copy stream.

    Args:
        device: The device; on a CPU, a thread takes the place of a CUDA stream.
        name: Name of the stream in recorded timelines.
        delays: Random delays before copies, in test mode.
        recorder: Records the copies and the computation's waits for them.
    """
    if device.type == "cuda":
        return CudaCopyStream(device, name, delays, recorder)
    return ThreadCopyStream(name, delays, recorder)


def use_device(device: torch.device) -> None:
    """Make a device the current one of a new thread, which starts on device 0 and would create a context there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class CopyStream(Protocol):
    """Runs copies in order, concurrently with the computation."""

    def copy(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        """Start a copy that runs once the computation submitted so far and the copies in `after` have ended.

        Args:
            destination: Contiguous memory to copy to.
            source: Contiguous memory of the same size to copy from.
            after: Copies that must end before.
            subject: The layer call or slice that the bytes belong to; `None` is the one being computed.
        """
        ...

    def computed(self) -> CopyEvent | None:
        """Return the end of the computation submitted so far; `None` if it has ended."""
        ...

    def copy_after(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        """Start a copy that runs once the copies in `after` have ended, whatever the state of the computation.

        Threads other than the training thread use it. For the arguments see :meth:`copy`.
        """
        ...

    def later(self) -> LaterEvent:
        """Return an event for copies that another thread is going to submit."""
        ...

    def synchronize(self) -> None:
        """Block until every submitted copy has ended."""
        ...

    def close(self) -> None:
        """Wait for the copies and stop the stream."""
        ...


class CopyError(RuntimeError):
    """A copy between device and host failed."""


class CopyEvent(Protocol):
    """The end of a copy. A consumer of the copied bytes waits for it."""

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


class CudaCopyStream:
    """A copy stream on CUDA; see :class:`CopyStream`.

    `record_stream` is not needed, because the engine waits for a copy before it frees the copied memory.
    """

    def __init__(
        self,
        device: torch.device,
        name: str = "copy",
        delays: Delays | None = None,
        recorder: TimelineRecorder | None = None,
    ) -> None:
        self._device, self._name, self._delays = device, name, delays
        self._recorder = recorder or TimelineRecorder(device)
        self._stream = torch.cuda.Stream(device, priority=_HIGH)

    def copy(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        return self.copy_after(destination, source, self.computed(), *after, subject=subject)

    def computed(self) -> CopyEvent | None:
        return self._event(torch.cuda.current_stream(self._device))

    def copy_after(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        for event in _cuda_events(after):
            self._stream.wait_event(event)
        subject = subject or self._recorder.subject
        with torch.cuda.stream(self._stream), self._recorder.copying(self._name, source.nbytes, subject):
            if self._delays is not None:
                torch.cuda._sleep(int(self._delays.seconds() * _CYCLES_PER_SECOND))
            destination.copy_(source, non_blocking=True)
        return self._event(self._stream)

    def later(self) -> LaterEvent:
        return LaterEvent(self._name, self._recorder)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()

    def _event(self, stream: torch.cuda.Stream) -> CudaCopyEvent:
        """Return the end of the work submitted to a stream so far."""
        event = torch.cuda.Event(blocking=True)  # the spill's threads sleep while they wait
        event.record(stream)
        return CudaCopyEvent(event, self._device, self._name, self._recorder)


class CudaCopyEvent:
    """The end of a copy on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, stream: str, recorder: TimelineRecorder) -> None:
        self.event = event
        self._device, self._stream, self._recorder = device, stream, recorder

    def wait(self) -> None:
        with self._recorder.waiting(self._stream):
            torch.cuda.current_stream(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


def _cuda_events(ends: Iterable[CopyEvent | None]) -> Iterator[torch.cuda.Event]:
    """Iterate over the CUDA events of ends of copies. Waits for threads that are going to start copies."""
    for end in ends:
        if isinstance(end, LaterEvent):
            yield from _cuda_events([end.when_started()])
        elif isinstance(end, AllOf):
            yield from _cuda_events(end.events)
        elif isinstance(end, CudaCopyEvent):
            yield end.event
        elif end is not None:
            raise TypeError(f"a copy on a CUDA stream cannot wait for {type(end).__name__}")


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


@dataclass(frozen=True, slots=True)
class TestMode:
    """Settings of the test mode: copies are delayed at random, and every released buffer is filled with NaN.

    Attributes:
        seed: Seed of the delays.
        longest_delay_seconds: Upper bound of a delay.
        plans: Which plan is taken: the "fastest", the one by "kinds" of tensors, or the one with a single "alpha".
        joint_attention: Whether attention runs over all slices of a layer at once also where it need not.
    """

    __test__ = False  # pytest takes a class of this name for a test case

    seed: int = 0
    longest_delay_seconds: float = 0.002
    plans: Literal["fastest", "kinds", "alpha"] = "fastest"
    joint_attention: bool = False


class Delays:
    """Random delays before copies, which reveal a missing wait.

    Args:
        seed: Seed of the delays.
        longest_seconds: Upper bound of a delay.
    """

    def __init__(self, seed: int, longest_seconds: float) -> None:
        self._random = random.Random(seed)
        self._longest_seconds = longest_seconds

    def seconds(self) -> float:
        """Return the next delay."""
        return self._random.uniform(0.0, self._longest_seconds)


def delays_of(test_mode: TestMode | None, stream: int) -> Delays | None:
    """Return the delays of stream number `stream`, with a seed of its own; `None` outside of test mode."""
    return None if test_mode is None else Delays(test_mode.seed + stream, test_mode.longest_delay_seconds)
