"""Points in time on the device."""

from __future__ import annotations

import time

import torch

Moment = torch.cuda.Event | float


class Clock:
    """Takes points in time on the device: CUDA events on the current stream, or the wall clock on a CPU.

    Args:
        device: Where the layers run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def now(self) -> Moment:
        """Return the present point in time, without waiting for the device."""
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def seconds(start: Moment, stop: Moment) -> float:
        """Return the seconds between two points in time, after waiting until the device has reached `stop`."""
        if isinstance(start, float) or isinstance(stop, float):
            return float(stop) - float(start)
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    @staticmethod
    def has_passed(moment: Moment) -> bool:
        """Return whether the device has reached a point in time."""
        return isinstance(moment, float) or moment.query()
