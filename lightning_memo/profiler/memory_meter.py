"""Peak device memory of a block of code or of the phases of a training step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

import torch

from lightning_memo.profiler.allocation_recorder import AllocationRecorder, AllocationRequest, Precedence


class PeakMeter:
    """Measures the peak of the allocated device bytes inside a `with` block, relative to the bytes at its start.

    On CUDA, the allocator's peak counter is reset at the start and read at the end. On a CPU, which has no counter,
    allocations are recorded; see `AllocationRecorder`.

    On CUDA, freeing memory that was allocated before the block lowers the level. On a CPU such memory is not known, and
    the peak is an upper bound; free the gradients before the block.

    Attributes:
        peak_bytes: The peak in bytes; 0 until the block has ended.

    Raises:
        ValueError: The device is neither a CPU nor a CUDA device.
        RuntimeError: On a CPU, another profiler is running or was started inside the block.
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
        self.peak_bytes = peak_of((address, size) for _, address, size in self._recorder.stop())
        self._recorder = None


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Peak bytes of a step, in addition to weights, gradients and optimizer state.

    Attributes:
        layers: Peak during the backward of the layers.
        outside: Peak before and after it: in the forward, the loss, and the optimizer step.
    """

    layers: int
    outside: int

    def with_more(self, size_bytes: int) -> WorkingSet:
        """Return the working set of a step that holds some more bytes from its beginning to its end."""
        return WorkingSet(self.layers + size_bytes, self.outside + size_bytes)


class WorkingSetMeter:
    """Measures the working set of a training step, from construction to `stop`.

    Memory that is still allocated at the end does not count. The memory of gradients is counted as allocated during the
    complete backward, so that gradients that do not exist yet lower the peak.

    Args:
        device: A CPU or a CUDA device.
        precedence: Which other measurements this one gives way to on a CPU; it ends without a result then.

    Raises:
        ValueError: The device is neither a CPU nor a CUDA device.
        RuntimeError: On a CPU, another profiler is running.
    """

    def __init__(self, device: torch.device, precedence: Precedence = Precedence.BLOCK) -> None:
        _check_device(device)
        self._device = device
        self._times = StepTimes()
        self._levels: dict[str, int] = {}  # on CUDA: peaks by phase, and the level at the end of the backward
        self._recorder = AllocationRecorder(precedence) if device.type == "cpu" else None
        if self._recorder is None:
            self._entry_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def begin_backward(self) -> None:
        """Note that the backward begins; only the first call counts."""
        if not self._times.backward:
            self._times.backward = time.time_ns()
            self._take_peak("forward")

    def begin_layers(self) -> None:
        """Note that the backward of the layers begins; only the first call counts."""
        if not self._times.layers:
            self._times.layers = time.time_ns()
            self._take_peak("loss")

    def end_backward(self) -> None:
        """Note that the backward has ended; the last call counts."""
        self._times.end = time.time_ns()
        self._take_peak("layers")

    def stop(self, kept_bytes: int, accumulating: bool) -> WorkingSet:
        """End the measurement and return the working set.

        Args:
            kept_bytes: Device memory that was allocated in the forward and stays allocated.
            accumulating: Whether gradients are accumulated, so that they exist before the backward.

        Raises:
            RuntimeError: On a CPU, another profiler was started in the meantime.
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
    """Times of a step in nanoseconds of the system's clock; 0 if they have not come.

    Attributes:
        backward: Start of the backward.
        layers: Start of the backward of the layers.
        end: End of the backward.
    """

    backward: int = 0
    layers: int = 0
    end: int = 0


def working_set(requests: Iterable[AllocationRequest], times: StepTimes, accumulating: bool = False) -> WorkingSet:
    """Return the working set of a step from its allocation requests; see `WorkingSetMeter`."""
    requests = list(requests)
    freed = _freed(requests)
    layers_begin = times.layers or times.end
    backward = range(times.backward or layers_begin, times.end)
    # Gradients. If they are accumulated, they exist from the start.
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


def _freed(requests: Iterable[AllocationRequest]) -> set[int]:
    """Return the numbers of the requests whose memory a later request frees."""
    alive: dict[int, int] = {}
    freed = set()
    for number, (_, address, size_bytes) in enumerate(requests):
        if size_bytes > 0:
            alive[address] = number
        elif address in alive:
            freed.add(alive.pop(address))
    return freed


def peak_of(requests: Iterable[tuple[int, int]]) -> int:
    """Return the largest number of bytes allocated at the same time.

    Args:
        requests: Address and size of each request in order; the size of a free is negative.
    """
    alive: dict[int, int] = {}
    level_bytes = peak_bytes = 0
    for address, size_bytes in requests:
        if size_bytes > 0:
            alive[address] = size_bytes
            level_bytes += size_bytes
            peak_bytes = max(peak_bytes, level_bytes)
        else:
            # For the free of a block from before the profile, the profiler reports the size of the block that an
            # earlier profile saw at that address. The size is therefore taken from this profile's allocation.
            level_bytes -= alive.pop(address, 0)
    return peak_bytes


def _check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"peak memory of device {str(device)!r} can't be measured: use a CPU or a CUDA device")
