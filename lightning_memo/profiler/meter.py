"""The device memory that a block of code takes at its peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Final

import torch
from torch.autograd.profiler import profile

_ALLOCATION: Final = "Allocation"


class PeakMeter:
    """Measures the peak of device bytes allocated above the level at entry, inside a `with` block.

    On CUDA the allocator's own counter is read: its peak is reset at entry, and the block takes no longer. On the
    CPU, where there is no counter, PyTorch's profiler records each allocation of the calling thread and of autograd's
    backward. The events of a step are kept in memory and read when the block ends: a block of many small operations
    takes up to ten times as long, one of large operations slightly longer. So don't time a step that is metered.

    What was allocated before the block and is freed inside it lowers the level on CUDA. The CPU profiler doesn't know
    such blocks, so there the level stays and the peak is an upper bound: free gradients before the block.

    Attributes:
        peak_bytes: the peak in bytes; 0 until the block has ended.

    Raises:
        ValueError: the device is neither a CPU nor a GPU of CUDA.
        RuntimeError: on the CPU, another profiler is running.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"peak memory of device {str(device)!r} can't be measured: use a CPU or a CUDA device")
        self.peak_bytes = 0
        self._device = device
        self._entry_bytes = 0
        self._profile: Any = None

    def __enter__(self) -> PeakMeter:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._entry_bytes = torch.cuda.memory_allocated(self._device)
        else:
            if torch.autograd.profiler._is_profiler_enabled:
                raise RuntimeError("peak memory can't be measured while another profiler runs: turn that one off")
            self._profile = profile(profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is None:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._entry_bytes
            return
        self._profile.__exit__(kind, error, trace)
        self.peak_bytes = _peak_bytes(_requests(self._profile.kineto_results.experimental_event_tree()))
        self._profile = None


def _requests(roots: list[Any]) -> Iterator[tuple[int, int]]:
    """Address and bytes (negative: freed) of each CPU allocation event, in the order of time."""
    events = []
    waiting = list(reversed(roots))
    while waiting:
        event = waiting.pop()
        waiting.extend(reversed(event.children))
        tag, allocation = event.typed
        if tag.name == _ALLOCATION and allocation.device.type == "cpu":
            events.append((event.start_time_ns, allocation.ptr, allocation.alloc_size))
    for _, address, size_bytes in sorted(events, key=lambda event: event[0]):
        yield address, size_bytes


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
