"""The device memory that a block of code takes at its peak."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple

import torch
from torch.autograd.profiler import profile

_ALLOCATION: Final = "Allocation"


class Request(NamedTuple):
    """Memory of the CPU that is allocated, or freed (its size is then negative)."""

    time_ns: int
    address: int
    size_bytes: int


class AllocationRecorder:
    """Records each allocation on the CPU of the calling thread and of autograd's backward, by PyTorch's profiler.

    The profiler is asked for memory only, not for operations, so that it hardly slows them: a step of many tiny ones
    takes a tenth longer. What it saw is kept in memory until `stop`.

    Raises:
        RuntimeError: Another profiler is running.
    """

    def __init__(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
            raise RuntimeError("peak memory can't be measured while another profiler runs: turn that one off")
        settings, activities = profile(profile_memory=True).config(), {torch.profiler.ProfilerActivity.CPU}
        torch._C._autograd._prepare_profiler(settings, activities)
        torch._C._autograd._enable_profiler(settings, activities, {torch._C._profiler.RecordScope.USER_SCOPE})

    def stop(self) -> list[Request]:
        """The requests since the start, in the order of time."""
        requests = []
        waiting = list(torch._C._autograd._disable_profiler().experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting.extend(event.children)
            tag, allocation = event.typed
            if tag.name == _ALLOCATION and allocation.device.type == "cpu":
                requests.append(Request(event.start_time_ns, allocation.ptr, allocation.alloc_size))
        return sorted(requests, key=lambda request: request.time_ns)


class PeakMeter:
    """Measures the peak of device bytes allocated above the level at entry, inside a `with` block.

    On CUDA the allocator's own counter is read: its peak is reset at entry, and the block takes no longer. On the
    CPU, where there is no counter, allocations are recorded; see `AllocationRecorder`.

    What was allocated before the block and is freed inside it lowers the level on CUDA. The CPU's recorder doesn't know
    such blocks, so there the level stays and the peak is an upper bound: free gradients before the block.

    Attributes:
        peak_bytes: the peak in bytes; 0 until the block has ended.

    Raises:
        ValueError: the device is neither a CPU nor a GPU of CUDA.
        RuntimeError: on the CPU, another profiler is running.
    """

    def __init__(self, device: torch.device) -> None:
        _check_device(device)
        self.peak_bytes = 0
        self._device = device
        self._entry_bytes = 0
        self._recorder: AllocationRecorder | None = None

    def __enter__(self) -> PeakMeter:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._entry_bytes = torch.cuda.memory_allocated(self._device)
        else:
            self._recorder = AllocationRecorder()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is None:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._entry_bytes
            return
        self.peak_bytes = _peak_bytes((address, size) for _, address, size in self._recorder.stop())
        self._recorder = None


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Highest peaks, in bytes, of what a step allocates and gives back: no weights, gradients or optimizer state."""

    layers: int
    """In the backward of the layers."""

    outside: int
    """Before and after it: in the forward, the loss, and the optimizer's step."""


class WorkingSetMeter:
    """Measures the working set of a training step, from construction to `stop`.

    On the CPU, what is still alive at the end does not count. On CUDA, where only levels are known, gradients count as
    there throughout the backward, and what the step was given to keep is told at the end.

    Args:
        device: A CPU or a GPU of CUDA.

    Raises:
        ValueError: Another device.
        RuntimeError: On the CPU, another profiler is running.
    """

    def __init__(self, device: torch.device) -> None:
        _check_device(device)
        self._device = device
        self._layers: list[int] = []  # when their backward begins and ends: times, or on CUDA peaks
        self._entry_bytes = self._before = self._during = 0
        self._recorder = AllocationRecorder() if device.type == "cpu" else None
        if self._recorder is None:
            self._entry_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def begin_layers(self) -> None:
        """The backward of the layers begins; only the first call counts."""
        if self._layers:
            return
        self._layers.append(time.time_ns())
        if self._recorder is None:
            self._before = self._take_peak() - self._entry_bytes

    def end_layers(self) -> None:
        """The backward is over; the last call counts."""
        self._layers.append(time.time_ns())
        if self._recorder is None:
            self._during = max(self._during, self._take_peak() - torch.cuda.memory_allocated(self._device))

    def stop(self, kept_bytes: int) -> WorkingSet:
        """What was measured.

        Args:
            kept_bytes: Device memory that was allocated in the forward, and stays.
        """
        if self._recorder is None:
            after = self._take_peak() - torch.cuda.memory_allocated(self._device)
            return WorkingSet(self._during, max(self._before - kept_bytes, after))
        requests = self._recorder.stop()
        begin_ns, end_ns = (self._layers[0], self._layers[-1]) if self._layers else (0, 0)
        return working_set(requests, begin_ns, end_ns)

    def _take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(peak)


def working_set(requests: Iterable[Request], begin_ns: int, end_ns: int) -> WorkingSet:
    """The working set of a step whose layers have their backward from `begin_ns` to `end_ns`."""
    requests = list(requests)
    freed = _freed(requests)
    alive: dict[int, int] = {}
    level = layers = outside = 0
    for number, (time_ns, address, size_bytes) in enumerate(requests):
        if size_bytes <= 0:
            level -= alive.pop(address, 0)
        elif number in freed:
            alive[address] = size_bytes
            level += size_bytes
            if begin_ns <= time_ns < end_ns:
                layers = max(layers, level)
            else:
                outside = max(outside, level)
    return WorkingSet(layers, outside)


def _freed(requests: Iterable[Request]) -> set[int]:
    """Which of the requests allocate what a later one frees."""
    alive: dict[int, int] = {}
    freed = set()
    for number, (_, address, size_bytes) in enumerate(requests):
        if size_bytes > 0:
            alive[address] = number
        elif address in alive:
            freed.add(alive.pop(address))
    return freed


def _peak_bytes(requests: Iterable[tuple[int, int]]) -> int:
    """Most bytes alive at once among what the requests allocate."""
    alive: dict[int, int] = {}
    level_bytes = peak_bytes = 0
    for address, size_bytes in requests:
        if size_bytes > 0:
            alive[address] = size_bytes
            level_bytes += size_bytes
            peak_bytes = max(peak_bytes, level_bytes)
        else:
            # The profiler reports the free of an older block with the size of whatever an earlier profile saw at
            # that address, which may be another block's.
            level_bytes -= alive.pop(address, 0)
    return peak_bytes


def _check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"peak memory of device {str(device)!r} can't be measured: use a CPU or a CUDA device")
