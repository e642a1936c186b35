"""Copies between device and host on streams of their own.

On CUDA a stream and its events; on the CPU, where "device" and "host" are both main memory, a thread that keeps the
same ordering rules, so that everything above can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_CYCLES_PER_SECOND = 2e9  # about; delays need no exact length


class CopyEvent(Protocol):
    """The end of one copy."""

    def wait(self) -> None:
        """Make the compute stream wait for the copy (on the CPU: wait for it).

        Raises:
            RuntimeError: The copy failed.
        """
        ...

    def synchronize(self) -> None:
        """Return when the copy has ended."""
        ...


class CopyStream(Protocol):
    """Copies that run one after the other, beside the computation."""

    def copy(self, destination: Tensor, source: Tensor, *after: CopyEvent | None) -> CopyEvent:
        """Copy bytes once what was computed so far, and `after`, are done."""
        ...

    def computed(self) -> CopyEvent | None:
        """The end of what was computed so far; `None` where it has ended."""
        ...

    def copy_after(self, destination: Tensor, source: Tensor, *after: CopyEvent | None) -> CopyEvent:
        """Copy bytes once `after` are done: for threads that know nothing of what is computed."""
        ...

    def synchronize(self) -> None:
        """Return when every copy handed in has ended."""
        ...

    def close(self) -> None: ...


class Delays:
    """Random delays before copies, to bring out a missing wait. Part of the engine's test mode."""

    def __init__(self, seed: int, longest_seconds: float) -> None:
        self._random = random.Random(seed)
        self._longest_seconds = longest_seconds

    def seconds(self) -> float:
        return self._random.uniform(0.0, self._longest_seconds)


@dataclass(frozen=True, slots=True)
class TestMode:
    """Brings out copy races: copies are delayed at random, and every released buffer is filled with NaN.

    Attributes:
        seed: Seed of the delays.
        longest_delay_seconds: Upper bound of one delay.
    """

    __test__ = False  # not a test case, whatever its name

    seed: int = 0
    longest_delay_seconds: float = 0.002


def delays_of(test_mode: TestMode | None, stream: int) -> Delays | None:
    """Delays of one of several streams, each with a seed of its own."""
    return None if test_mode is None else Delays(test_mode.seed + stream, test_mode.longest_delay_seconds)


class ThreadCopyEvent:
    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise RuntimeError(f"a copy between device and host failed: {self.error}") from self.error

    synchronize = wait


class LaterEvent:
    """The end of copies that another thread starts when it can."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._copy: CopyEvent | None = None
        self._error: BaseException | None = None

    def start(self, copy: CopyEvent | None) -> None:
        """All copies were handed in, `copy` last; `None`: all have ended."""
        self._copy = copy
        self._started.set()

    def fail(self, error: BaseException) -> None:
        """There is going to be no copy."""
        self._error = error
        self._started.set()

    def wait(self) -> None:
        copy = self._when_started()
        if copy is not None:
            copy.wait()

    def synchronize(self) -> None:
        copy = self._when_started()
        if copy is not None:
            copy.synchronize()

    def _when_started(self) -> CopyEvent | None:
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self._copy


class AllOf:
    """The end of several copies."""

    def __init__(self, events: Sequence[CopyEvent]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


class ThreadCopyStream:
    """One thread that copies with `memmove`, which runs without the interpreter's lock and on one core only."""

    def __init__(self, name: str, delays: Delays | None = None) -> None:
        self._delays = delays
        self._jobs: queue.SimpleQueue[tuple[Tensor, Tensor, tuple[CopyEvent | None, ...], ThreadCopyEvent] | None] = (
            queue.SimpleQueue()
        )
        self._last: ThreadCopyEvent | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def copy(self, destination: Tensor, source: Tensor, *after: CopyEvent | None) -> CopyEvent:
        self._last = event = ThreadCopyEvent()
        self._jobs.put((destination, source, after, event))
        return event

    def computed(self) -> CopyEvent | None:
        return None

    copy_after = copy

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            destination, source, after, event = job
            error: BaseException | None = None
            try:
                for before in after:
                    if before is not None:
                        before.wait()
                if self._delays is not None:
                    time.sleep(self._delays.seconds())
                ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
            except BaseException as raised:  # handed to whoever waits
                error = raised
            # Whoever waits may count memory: the tensors live until then, and the last job's until the next one else.
            del job, destination, source, after
            event.finish(error)
            del event, error


class CudaCopyEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaCopyStream:
    """A CUDA stream. Whoever frees what it copies has waited for the copy, so `record_stream` is not needed."""

    def __init__(self, device: torch.device, delays: Delays | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._delays = delays

    def copy(self, destination: Tensor, source: Tensor, *after: CopyEvent | None) -> CopyEvent:
        return self.copy_after(destination, source, self.computed(), *after)

    def computed(self) -> CopyEvent | None:
        return CudaCopyEvent(torch.cuda.current_stream(self._device).record_event(), self._device)

    def copy_after(self, destination: Tensor, source: Tensor, *after: CopyEvent | None) -> CopyEvent:
        for before in after:
            if isinstance(before, CudaCopyEvent):
                self._stream.wait_event(before.event)
        with torch.cuda.stream(self._stream):
            if self._delays is not None:
                torch.cuda._sleep(int(self._delays.seconds() * _CYCLES_PER_SECOND))
            destination.copy_(source, non_blocking=True)
            return CudaCopyEvent(self._stream.record_event(), self._device)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()


def make_copy_stream(device: torch.device, name: str, delays: Delays | None = None) -> CopyStream:
    """The copy stream of a device."""
    return CudaCopyStream(device, delays) if device.type == "cuda" else ThreadCopyStream(name, delays)
