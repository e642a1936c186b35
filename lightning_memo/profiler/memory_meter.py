"""The device memory that a block of code takes at its peak."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Final, NamedTuple

import torch
from torch.autograd.profiler import profile

_ALLOCATION: Final = "Allocation"
# Training has no events of this scope. A recorded event that ends after the profiler, like a collective that is still
# under way (of USER_SCOPE) when it is stopped, writes its end time into freed memory: PyTorch does not check for it.
_SCOPE_WITHOUT_EVENTS: Final = torch._C._profiler.RecordScope.STATIC_RUNTIME_MODEL


class Request(NamedTuple):
    """Memory of the CPU that is allocated, or freed (its size is then negative)."""

    time_ns: int
    address: int
    size_bytes: int


class AllocationRecorder:
    """Records each allocation on the CPU of the calling thread and of autograd's backward, by PyTorch's profiler.

    The profiler is asked for memory only, not for operations, so that it hardly slows them: a step of many tiny ones
    takes a tenth longer. What it saw is kept in memory until `stop`.

    Args:
        gives_way: End without an answer where another recorder starts, which else could not.

    Raises:
        RuntimeError: Another profiler is running.
    """

    _giving_way: ClassVar[AllocationRecorder | None] = None

    def __init__(self, gives_way: bool = False) -> None:
        if AllocationRecorder._giving_way is not None:
            with contextlib.suppress(RuntimeError):  # it had been ended before
                AllocationRecorder._giving_way.stop()
        if torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
            raise RuntimeError("peak memory can't be measured while another profiler runs: turn that one off")
        # Read when a process profiles first: two lines about each measured step tell a user nothing.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        settings, activities = profile(profile_memory=True).config(), {torch.profiler.ProfilerActivity.CPU}
        torch._C._autograd._prepare_profiler(settings, activities)
        torch._C._autograd._enable_profiler(settings, activities, {_SCOPE_WITHOUT_EVENTS})
        self._gave_way = False
        if gives_way:
            AllocationRecorder._giving_way = self

    def stop(self) -> list[Request]:
        """The requests since the start, in the order of time.

        Raises:
            RuntimeError: Another profiler was started meanwhile, which ended this one.
        """
        if self._gave_way:
            raise RuntimeError("peak memory was not measured: another measurement was started meanwhile")
        if AllocationRecorder._giving_way is self:
            AllocationRecorder._giving_way, self._gave_way = None, True
        if torch.autograd.profiler._is_profiler_enabled or not torch._C._autograd._profiler_enabled():
            raise RuntimeError("peak memory was not measured: another profiler was started meanwhile, turn it off")
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
        RuntimeError: on the CPU, another profiler is running, or was started inside the block.
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
    """Highest peaks of a step in bytes, above its weights, all their gradients, and the optimizer's state."""

    layers: int
    """In the backward of the layers."""

    outside: int
    """Before and after it: in the forward, the loss, and the optimizer's step."""


class WorkingSetMeter:
    """Measures the working set of a training step, from construction to `stop`.

    What is still alive at the end does not count. In the backward, gradients that are not there yet leave room.

    Args:
        device: A CPU or a GPU of CUDA.
        gives_way: On the CPU, end without an answer where something else is measured meanwhile.

    Raises:
        ValueError: Another device.
        RuntimeError: On the CPU, another profiler is running.
    """

    def __init__(self, device: torch.device, gives_way: bool = False) -> None:
        _check_device(device)
        self._device = device
        self._times = StepTimes()
        self._levels: dict[str, int] = {}  # on CUDA: peaks by phase, and the level at the end of the backward
        self._recorder = AllocationRecorder(gives_way) if device.type == "cpu" else None
        if self._recorder is None:
            self._entry_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def begin_backward(self) -> None:
        """The backward begins; the first call counts."""
        if not self._times.backward:
            self._times.backward = time.time_ns()
            self._take_peak("forward")

    def begin_layers(self) -> None:
        """The backward of the layers begins; the first call counts."""
        if not self._times.layers:
            self._times.layers = time.time_ns()
            self._take_peak("loss")

    def end_backward(self) -> None:
        """The backward is over; the last call counts."""
        self._times.end = time.time_ns()
        self._take_peak("layers")

    def stop(self, kept_bytes: int, accumulating: bool) -> WorkingSet:
        """What was measured.

        Args:
            kept_bytes: Device memory that was allocated in the forward, and stays.
            accumulating: Whether gradients of an earlier backward are there in others.

        Raises:
            RuntimeError: On the CPU, another profiler was started meanwhile.
        """
        if self._recorder is not None:
            return working_set(self._recorder.stop(), self._times, accumulating)
        self._take_peak("optimizer")
        levels, at_first = self._levels, self._entry_bytes + kept_bytes
        at_end = at_first if accumulating else levels.get("end of layers", at_first)
        outside = (
            levels.get("forward", 0) - at_first,
            levels.get("loss", 0) - at_end,
            levels["optimizer"] - levels["end of optimizer"],
        )
        return WorkingSet(max(levels.get("layers", 0) - at_end, 0), max(*outside, 0))

    def _take_peak(self, phase: str) -> None:
        if self._recorder is None:
            self._levels[phase] = max(torch.cuda.max_memory_allocated(self._device), self._levels.get(phase, 0))
            self._levels[f"end of {phase}"] = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(slots=True)
class StepTimes:
    """When phases of a step begin, in nanoseconds of the system's clock; 0 if they did not."""

    backward: int = 0
    layers: int = 0
    end: int = 0
    """Of the backward."""


def working_set(requests: Iterable[Request], times: StepTimes, accumulating: bool = False) -> WorkingSet:
    """The working set of a step that made these requests; see `WorkingSetMeter`."""
    requests = list(requests)
    freed = _freed(requests)
    layers_begin = times.layers or times.end
    backward = range(times.backward or layers_begin, times.end)
    # Gradients; where they are accumulated, they are there from the start.
    born = {
        number: request.size_bytes
        for number, request in enumerate(requests)
        if request.size_bytes > 0 and request.time_ns in backward and number not in freed and not accumulating
    }
    missing = sum(born.values())
    alive: dict[int, int] = {}
    level = layers = outside = 0
    for number, (time_ns, address, size_bytes) in enumerate(requests):
        missing -= born.get(number, 0)
        if size_bytes <= 0:
            level -= alive.pop(address, 0)
        elif number in freed:
            alive[address] = size_bytes
            level += size_bytes
        peak = level - missing if time_ns in backward else level
        if layers_begin <= time_ns < times.end:
            layers = max(layers, peak)
        else:
            outside = max(outside, peak)
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
