"""Points in time on the device."""

from __future__ import annotations

import time

import torch

Moment = torch.cuda.Event | float


class Clock:
    """Points in time on the device: CUDA events on its current stream, the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def now(self) -> Moment:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def seconds(start: Moment, stop: Moment) -> float:
        """Seconds between two points; waits until the device has come to the second."""
        if isinstance(start, float) or isinstance(stop, float):
            return float(stop) - float(start)
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    @staticmethod
    def has_passed(moment: Moment) -> bool:
        """Whether the device has come to a point in time."""
        return isinstance(moment, float) or moment.query()
