"""Peak device memory of a block of code or of the phases of a training step, from its recorded allocations.

Allocations on the CPU are recorded with PyTorch's profiler, of which a process has one. A second profiler crashes the
process if it begins in another thread while the first one runs, or while one with a schedule warms up; in the same
thread, it raises. A recorder therefore does not begin during the user's profilers, and ends before one begins.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.autograd import profiler

_ALLOCATION: Final = torch._C._profiler._EventType.Allocation
# Training has no events of this scope. A recorded event that ends after the profiler, like a collective that is still
# under way (of USER_SCOPE) when it is stopped, writes its end time into freed memory: PyTorch does not check for it.
_SCOPE_WITHOUT_EVENTS: Final = torch._C._profiler.RecordScope.STATIC_RUNTIME_MODEL
_ACTIVITIES: Final = {torch.profiler.ProfilerActivity.CPU}


class AllocationRequest(NamedTuple):
    """An allocation on the CPU, or a free.

    Attributes:
        time_ns: Time in nanoseconds of the system's clock.
        address: Address of the memory.
        size_bytes: Size of the allocation; negative for a free.
    """

    time_ns: int
    address: int
    size_bytes: int


class Precedence(IntEnum):
    """Which recorder of a thread goes on when another one begins: one that gives way ends without a result."""

    LATER_STEP = 0
    """Gives way to all."""

    FIRST_STEP = 1
    """Gives way to all but later steps. It may have been left behind by a training that failed."""

    BLOCK = 2
    """Gives way to the user's profilers only."""


class AllocationRecorder:
    """Records the CPU allocations of the calling thread and of autograd's backward with PyTorch's profiler.

    The profiler records memory only, not operations, and slows them little: a step of many tiny operations takes a
    tenth longer. Its events are kept in memory until `stop`.

    Args:
        precedence: Which other recorders this one gives way to.

    Raises:
        RuntimeError: Another profiler is running.
    """

    def __init__(self, precedence: Precedence = Precedence.BLOCK) -> None:
        self.precedence, self.thread = precedence, threading.get_ident()
        _one_recorder().begin(self)
        # A process that ends while the profiler runs would be killed by SIGSEGV: the profiler uses objects of its own
        # that are gone by then.
        atexit.register(self.end)

    def gives_way_to(self, other: AllocationRecorder) -> bool:
        """Return whether this recorder ends when another one begins."""
        same_thread = self.thread == other.thread
        return same_thread and self.precedence < Precedence.BLOCK and self.precedence <= other.precedence

    def end(self) -> None:
        """End without a result, if that has not been done."""
        with contextlib.suppress(RuntimeError):
            self.stop()

    def stop(self) -> list[AllocationRequest]:
        """Return the requests since the start, in the order of time.

        Raises:
            RuntimeError: Another profiler or recorder was started in the meantime, which ended this one.
        """
        atexit.unregister(self.end)
        requests = []
        waiting = list(_one_recorder().end(self).experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting.extend(event.children)
            tag, allocation = event.typed
            if tag == _ALLOCATION and allocation.device.type == "cpu":
                requests.append(AllocationRequest(event.start_time_ns, allocation.ptr, allocation.alloc_size))
        return sorted(requests, key=lambda request: request.time_ns)


class _OneRecorder:
    """Lets one recorder or the user's profilers use PyTorch's profiler at a time, once it has been constructed.

    Note: [Abandoned recorders]
    PyTorch's profiler has a state in the thread that started it, which only this thread can end, and a trace in Kineto,
    which is one for the process. If a user's profiler begins in another thread than the recorder's, the trace ends
    before, and the state is left behind. Its thread ends it after the user's profilers. PyTorch follows a null
    pointer if there is no trace then, so that a trace is begun just before.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._recorder: AllocationRecorder | None = None
        self._abandoned: list[AllocationRecorder] = []
        # The user's profilers, and their results when they were prepared: once they have ended, they have others.
        self._users: WeakKeyDictionary[profiler.profile, Any] = WeakKeyDictionary()
        profiler.profile._prepare_trace = self._making_room(profiler.profile._prepare_trace)  # type: ignore[method-assign]
        profiler._run_on_profiler_start = self._making_room(profiler._run_on_profiler_start)
        for each in gc.get_referrers(profiler.profile):
            if isinstance(each, profiler.profile) and each.entered and each.kineto_results is None:
                self._users[each] = None

    def begin(self, recorder: AllocationRecorder) -> None:
        """Start to record.

        Raises:
            RuntimeError: Another profiler is running.
        """
        with self._lock:
            self.end_abandoned()
            earlier = self._recorder
            if earlier is not None and earlier.gives_way_to(recorder):
                earlier.end()
            if self._users_run or self._recorder is not None:
                raise RuntimeError("peak memory can't be measured while another profiler runs: turn that one off")
            _enable()
            self._recorder = recorder

    def end(self, recorder: AllocationRecorder) -> Any:
        """Stop to record, and return PyTorch's result.

        Raises:
            RuntimeError: The recorder has been ended, or runs in another thread.
        """
        with self._lock:
            if self._recorder is not recorder or recorder.thread != threading.get_ident():
                self.end_abandoned()
                raise RuntimeError(
                    "peak memory was not measured: another profiler was started in the meantime, turn it off"
                )
            self._recorder = None
            return torch._C._autograd._disable_profiler()

    def end_abandoned(self) -> None:
        """End the recorder that this thread has abandoned; see Note: [Abandoned recorders]."""
        with self._lock:
            for recorder in [each for each in self._abandoned if each.thread == threading.get_ident()]:
                if not self._prepared:
                    _in_other_thread(_enable)
                    torch._C._autograd._disable_profiler()
                    self._abandoned.remove(recorder)

    @property
    def _prepared(self) -> bool:
        """Whether a profiler of the user is warming up or running."""
        return any(each.kineto_results is before for each, before in self._users.items())

    @property
    def _users_run(self) -> bool:
        return self._prepared or profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()

    def _making_room(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of PyTorch's with which a profiler starts, before which the recorder ends."""

        @functools.wraps(start)
        def starts(*args: Any) -> Any:
            with self._lock:
                if self._recorder is not None and self._recorder.thread == threading.get_ident():
                    self._recorder.end()
                elif self._recorder is not None:
                    self._abandoned.append(self._recorder)
                    self._recorder = None
                    _in_other_thread(_enable_and_disable)
                self.end_abandoned()
                if args:
                    self._users[args[0]] = args[0].kineto_results
            return start(*args)

        return starts


def _enable() -> None:
    # Read when a process profiles for the first time. It silences two lines of log per measured step.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    settings = profiler.profile(profile_memory=True).config()  # type: ignore[no-untyped-call]
    torch._C._autograd._prepare_profiler(settings, _ACTIVITIES)
    scopes = {_SCOPE_WITHOUT_EVENTS}
    torch._C._autograd._enable_profiler(settings, _ACTIVITIES, scopes)  # type: ignore[call-arg]


def _enable_and_disable() -> None:
    _enable()
    torch._C._autograd._disable_profiler()


def _in_other_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def end_abandoned() -> None:
    """End a recorder of this thread, in whose place another thread has profiled."""
    if _created.cache_info().currsize:
        _one_recorder().end_abandoned()


_creation = threading.Lock()


def _one_recorder() -> _OneRecorder:
    with _creation:
        return _created()


@functools.cache
def _created() -> _OneRecorder:
    return _OneRecorder()


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
