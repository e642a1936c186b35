"""Copies between device and host on streams of their own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_memo.engine.copies.copy_events import CopyEvent, LaterEvent
from lightning_memo.engine.copies.cuda_stream import CudaCopyStream
from lightning_memo.engine.copies.step_recorder import StepRecorder, Subject
from lightning_memo.engine.copies.test_mode import Delays
from lightning_memo.engine.copies.thread_stream import ThreadCopyStream


class CopyStream(Protocol):
    """Copies that run one after the other, beside the computation."""

    def copy(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        """Copy bytes once what was computed so far, and `after`, are done.

        Args:
            destination: Where they go.
            source: Where they lie; of the same size, and as contiguous.
            after: Copies that have to end before.
            subject: What the copy is for; `None`: for what is computed now.
        """
        ...

    def computed(self) -> CopyEvent | None:
        """The end of what was computed so far; `None` where it has ended."""
        ...

    def copy_after(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        """Copy bytes once `after` are done: for threads that know nothing of what is computed."""
        ...

    def later(self) -> LaterEvent:
        """The end of copies that another thread is going to hand in."""
        ...

    def synchronize(self) -> None:
        """Return when every copy handed in has ended."""
        ...

    def close(self) -> None: ...


def make_copy_stream(
    device: torch.device, name: str, delays: Delays | None = None, recorder: StepRecorder | None = None
) -> CopyStream:
    """The copy stream of a device; its copies, and waits for them, are told to `recorder` by the stream's name."""
    if device.type == "cuda":
        return CudaCopyStream(device, name, delays, recorder)
    return ThreadCopyStream(name, delays, recorder)
