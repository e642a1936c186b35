"""The interface of a copy stream between device and host, and the choice of its implementation."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyEvent, LaterEvent
from lightning_memo.engine.copies.cuda_stream import CudaCopyStream
from lightning_memo.engine.copies.test_mode import Delays
from lightning_memo.engine.copies.thread_stream import ThreadCopyStream
from lightning_memo.engine.copies.timeline_recorder import Subject, TimelineRecorder


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
