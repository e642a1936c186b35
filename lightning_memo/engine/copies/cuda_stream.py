"""Copies on a separate CUDA stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_memo.engine.copies.copy_events import AllOf, CopyEvent, LaterEvent
from lightning_memo.engine.copies.test_mode import Delays
from lightning_memo.engine.copies.timeline_recorder import Subject, TimelineRecorder

_CYCLES_PER_SECOND = 2e9  # approximately; the length of a delay need not be exact
_HIGH = -1  # with high priority, a copy that is ready does not wait for thread blocks of a kernel that are not


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
