"""The activity of a GPU in a step: kernels and copies by PyTorch's profiler, clock and power by the driver."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
_LISTED = 40
_COPIES = {"copy_out": "DtoH", "copy_in": "HtoD"}


class Pace(NamedTuple):
    """How fast a GPU may run: a GPU that gets hot or needs too much power lowers its clock.

    Attributes:
        megahertz: Clock of the multiprocessors; `None` if the driver does not tell.
        watts: Power that the GPU draws; `None` if the driver does not tell.
    """

    megahertz: int | None = None
    watts: float | None = None


def pace(device: torch.device) -> Pace:
    """Returns the pace of a device at present. It does not wait for the device, so that of a busy one is found."""
    if device.type == "cuda":
        with contextlib.suppress(Exception):  # NVML and its Python package are optional, and their errors are many
            return Pace(torch.cuda.clock_rate(device), torch.cuda.power_draw(device) / 1000)
    return Pace()


@contextlib.contextmanager
def recording(device: torch.device) -> Iterator[list[tuple[str, float, float]]]:
    """Records the activity of a GPU inside the block, as names, starts and stops in seconds; nothing on a CPU."""
    events: list[tuple[str, float, float]] = []
    if device.type != "cuda":
        yield events
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield events
        torch.cuda.synchronize(device)
    events += [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def summary(events: Iterable[tuple[str, float, float]]) -> dict[str, float] | None:
    """Returns the seconds of kernels, of copies by direction, of copies during which no kernel runs, and of idle time.

    Args:
        events: Names, starts and stops of the device's activity.

    Returns:
        The seconds by kind, or `None` if nothing was recorded.
    """
    kernels: list[Interval] = []
    copies: dict[str, list[Interval]] = {name: [] for name in _COPIES}
    for name, start, stop in events:
        direction = next((key for key, mark in _COPIES.items() if name.startswith("Memcpy") and mark in name), None)
        (kernels if direction is None else copies[direction]).append((start, stop))
    busy = union(kernels)
    moving = union([interval for intervals in copies.values() for interval in intervals])
    if not busy and not moving:
        return None
    both = union([*busy, *moving])
    return {
        "kernel_seconds": total(busy),
        **{f"{name}_seconds": total(union(intervals)) for name, intervals in copies.items()},
        "exposed_copy_seconds": total(both) - total(busy),
        "idle_seconds": both[-1][1] - both[0][0] - total(both),
    }


def kernels(events: Iterable[tuple[str, float, float]]) -> list[tuple[str, int, float]]:
    """Returns the kernels that take longest: their names, how often they ran, and their seconds."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name, start, stop in events:
        if not name.startswith("Mem"):  # copies and fills
            times[name].append(stop - start)
    found = [(name, len(seconds), sum(seconds)) for name, seconds in times.items()]
    return sorted(found, key=lambda kernel: -kernel[2])[:_LISTED]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals into sorted intervals that do not overlap."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def total(intervals: Sequence[Interval]) -> float:
    """Returns the total length of intervals that do not overlap."""
    return sum(stop - start for start, stop in intervals)
