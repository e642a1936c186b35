"""The planned allocator, as the rest of the package sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from lightning_memo.allocator.allocator_library import AllocatorLibrary


@dataclass(frozen=True)
class AllocatorStats:
    """What became of the requests since `PlannedAllocator.reset_stats`.

    Requests inside a phase are either hits, or misses (delegated to PyTorch's allocator) for one of four reasons.
    Smaller requests than the plan's least are in no counter.

    Attributes:
        hits: served from the arena.
        miss_size: no request of the phase has this size in the plan.
        miss_end: the phase makes more requests of this size than the plan has; all those of a phase that it has not.
        miss_overlap: the place is still occupied.
        unplanned: the plan leaves the request out.
        out_of_order: requests of the plan that were taken in another order than recorded, as others were missing.
        foreign: made by threads that never marked a phase.
        outside: made by other threads outside of a phase, or where nothing is planned: another stream, a memory pool.
        live_bytes: bytes of the arena in use.
        peak_live_bytes: the most of them at any time.
        live_blocks: how many planned blocks are alive.
        arena_bytes: the arena's size; 0 if there is none.
        bad_frees: frees of arena addresses at which no block was alive. Always 0, or there is a bug.
    """

    hits: int
    miss_size: int
    miss_end: int
    miss_overlap: int
    unplanned: int
    out_of_order: int
    foreign: int
    outside: int
    live_bytes: int
    peak_live_bytes: int
    live_blocks: int
    arena_bytes: int
    bad_frees: int

    @property
    def misses(self) -> int:
        """Requests inside a phase that the arena did not serve."""
        return self.miss_size + self.miss_end + self.miss_overlap + self.unplanned


class PlannedAllocator:
    """Serves the requests of a training step at the places of a plan.

    It stands in front of PyTorch's own allocator, and passes on all that it does not serve. A plan that does not fit
    what happens costs speed, never correctness: a place is given only if all its bytes are free.

    A process has one such allocator per type of device; objects for the same type share it.

    Args:
        device: A CPU, or the CUDA device whose current stream is recorded and served. No index: the current device.

    Raises:
        BuildError: the library can't be compiled: no compiler, or a torch that it was not written for.
        ValueError: a device that is neither.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"no planned allocator for device {str(device)!r}: use a CPU or a CUDA device")
        self._library = AllocatorLibrary(device.type)
        self._device = device
        # Bound once: these run at every phase marker.
        self._phase = self._library.phase
        self._leave = self._library.leave

    @property
    def installed(self) -> bool:
        """Whether PyTorch asks this allocator now."""
        return bool(self._library.call("memo_installed"))

    def install(self) -> None:
        """Stands in front of PyTorch's allocator; does nothing when it does already. Blocks from before stay valid.

        Raises:
            RuntimeError: another allocator is in use that can't be wrapped.
        """
        self._library.call("memo_install")

    def uninstall(self) -> None:
        """Restores the allocator from before; does nothing when not installed. Blocks that are alive stay valid."""
        self._library.call("memo_uninstall")

    def idle(self) -> None:
        """Passes on all requests."""
        self._library.call("memo_idle")

    def record(self, min_bytes: int) -> None:
        """Passes on all requests, and records those inside of phases. Earlier events are dropped.

        Args:
            min_bytes: Smaller requests are not recorded.

        Raises:
            ValueError: a negative number.
        """
        _check_min_bytes(min_bytes)
        self._library.call("memo_record", self._device_index(), min_bytes)

    def serve(self, phases: Sequence[tuple[np.ndarray, np.ndarray]], arena_bytes: int, min_bytes: int) -> None:
        """Loads a plan, takes the arena if the one from before is too small, and serves.

        Blocks of an earlier plan stay where they are; requests whose places they occupy are misses until they are free.

        Args:
            phases: For each phase the sizes and the offsets of its requests, in bytes. A negative offset leaves the
                request to PyTorch's allocator. Offsets are multiples of 64 on the CPU, of 512 on CUDA.
            arena_bytes: The arena's size.
            min_bytes: Smaller requests are not planned.

        Raises:
            ValueError: a plan that can't be served; the one from before stays.
            RuntimeError: no memory for the arena, or blocks are alive in one that is too small.
        """
        _check_min_bytes(min_bytes)
        if arena_bytes <= 0:
            raise ValueError(f"arena_bytes={arena_bytes}: give a positive number of bytes")
        for index, (sizes, offsets) in enumerate(phases):
            if len(sizes) != len(offsets):
                raise ValueError(f"phase {index}: {len(sizes)} sizes, but {len(offsets)} offsets")
        counts = np.array([len(sizes) for sizes, _ in phases], np.int64)
        sizes = _joined([sizes for sizes, _ in phases])
        offsets = _joined([offsets for _, offsets in phases])
        addresses = (array.ctypes.data for array in (counts, sizes, offsets))
        self._library.call("memo_serve", self._device_index(), min_bytes, arena_bytes, len(phases), *addresses)

    def phase(self, index: int) -> None:
        """The calling thread enters the planned computation; phase ``index`` begins, or begins again.

        There is one current phase for all threads of the process.

        Args:
            index: The phase, from 0. One that the plan doesn't have has no planned requests.
        """
        self._phase(index)

    def leave(self) -> None:
        """The calling thread leaves the planned computation, and the phase ends for all threads."""
        self._leave()

    def take_events(self) -> np.ndarray:
        """The events recorded so far, an array of type `EVENT`; they are then forgotten. Recording goes on."""
        return self._library.take_events()

    def stats(self) -> AllocatorStats:
        return AllocatorStats(*self._library.stats(len(fields(AllocatorStats))))

    def reset_stats(self) -> None:
        """Starts all counters at 0 again. What is alive stays counted, and is the new peak."""
        self._library.call("memo_reset_stats")

    def release(self) -> bool:
        """Stops serving and gives the arena back, at once or when the last planned block is freed.

        Returns:
            Whether the arena is gone already.
        """
        return bool(self._library.call("memo_release"))

    def _device_index(self) -> int:
        if self._device.type == "cpu":
            return 0
        return torch.cuda.current_device() if self._device.index is None else self._device.index


def _check_min_bytes(min_bytes: int) -> None:
    if min_bytes < 0:
        raise ValueError(f"min_bytes={min_bytes}: give 0 or more bytes")


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(array, np.int64) for array in arrays)])
