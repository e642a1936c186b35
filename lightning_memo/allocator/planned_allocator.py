"""The Python interface of the planned allocator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
import torch

from lightning_memo.utils import native_build as native

SOURCE_FOLDER: Final = Path(__file__).parent / "csrc"

MALLOC: Final = 0
FREE: Final = 1

# A recorded request, with the same fields as in csrc/recorder.h:
# kind: MALLOC or FREE.
# phase: the phase, -1 outside of all phases.
# sequence: for a malloc its number within the phase, or -1 if it can't be planned (another stream); for a free the
#     number of plannable mallocs of the phase before it.
# thread: number of the thread, from 0, in the order in which threads made their first request.
# id: the same for a malloc and its free.
# size: bytes.
# stream: the stream's handle; 0 on a CPU and for frees.
# ns: time of the steady clock in nanoseconds.
EVENT: Final = np.dtype(
    [
        ("kind", np.int32),
        ("phase", np.int32),
        ("sequence", np.int32),
        ("thread", np.int32),
        ("id", np.int64),
        ("size", np.int64),
        ("stream", np.int64),
        ("ns", np.int64),
    ]
)

_INT64 = ctypes.c_int64
_INT32 = ctypes.c_int32
_ADDRESS = ctypes.c_void_p
_STATUS = _INT32  # negative if the function failed
_FUNCTIONS: Final[dict[str, native.Signature]] = {
    "memo_error": (ctypes.c_char_p,),
    "memo_install": (_STATUS,),
    "memo_uninstall": (_STATUS,),
    "memo_installed": (_INT32,),
    "memo_phase": (None, _INT32),
    "memo_leave": (None,),
    "memo_idle": (None,),
    "memo_record": (_STATUS, _INT32, _INT64),
    "memo_serve": (_STATUS, _INT32, _INT64, _INT64, _INT64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    "memo_release": (_STATUS,),
    "memo_event_count": (_INT64,),
    "memo_take_events": (_INT64, _ADDRESS, _INT64),
    "memo_stats": (None, _ADDRESS),
    "memo_reset_stats": (None,),
}
_WRONG_PLAN: Final = -2


class AllocatorLibrary:
    """The allocator's functions for a device type.

    A process has one such library per device type. It stays loaded, because blocks that it allocated may outlive all
    other objects.

    Args:
        device_type: "cpu" or "cuda".

    Attributes:
        phase: Begins a phase; see :meth:`PlannedAllocator.phase`.
        leave: Ends the phase; see :meth:`PlannedAllocator.leave`.

    Raises:
        BuildError: The library can't be built.
    """

    def __init__(self, device_type: str) -> None:
        name = f"allocator_{device_type}"
        sources = [SOURCE_FOLDER / f"{name}.cpp"]
        if device_type == "cuda" and torch.version.cuda is None:
            raise native.BuildError(f"torch {torch.__version__} is built without CUDA: install a build with CUDA")
        flags = native.torch_flags(cuda=device_type == "cuda")
        self._functions = native.load(name, sources, _FUNCTIONS, flags)
        # Phase markers are so short that releasing the GIL would take longer than the call.
        short = native.load(name, sources, _FUNCTIONS, flags, keep_gil=True)
        self.phase: Callable[[int], object] = short.memo_phase
        self.leave: Callable[[], object] = short.memo_leave

    def call(self, name: str, *arguments: int) -> int:
        """Call a function by name and return its result.

        Raises:
            ValueError: The plan can't be served.
            RuntimeError: The function failed for another reason.
        """
        result = int(getattr(self._functions, name)(*arguments) or 0)
        if result < 0:
            kind = ValueError if result == _WRONG_PLAN else RuntimeError
            raise kind(self._functions.memo_error().decode())
        return result

    def stats(self, count: int) -> list[int]:
        """Return the counters, in the order of csrc/allocator_core.h."""
        values = np.zeros(count, np.int64)
        self._functions.memo_stats(values.ctypes.data)
        return [int(value) for value in values]

    def take_events(self) -> np.ndarray:
        """Return all recorded events and delete them from the recording."""
        events = np.zeros(self.call("memo_event_count"), EVENT)
        taken = self.call("memo_take_events", events.ctypes.data, len(events))
        return events[:taken]


@dataclass(frozen=True)
class AllocatorStats:
    """Counters of memory requests since `PlannedAllocator.reset_stats`.

    A request inside a phase is a hit, or it is served at no place for one of four reasons. It is then fitted into free
    bytes of the arena, or else delegated to PyTorch's allocator. Requests below `min_bytes` are not counted.

    Attributes:
        hits: Requests served at their places.
        fitted: Requests served from free bytes of the arena.
        miss_size: Requests of a size that the plan does not have in this phase.
        miss_end: Requests beyond the number that the plan has of this size in this phase, requests out of turn of which
            the plan has only such that are served in turn, and all requests of a phase that the plan does not have.
        miss_overlap: Requests whose planned bytes are still in use.
        unplanned: Requests that the plan leaves to PyTorch's allocator. They are never fitted.
        served_bytes: Bytes of all requests that the arena served.
        missed_bytes: Bytes of all requests inside a phase that it did not serve.
        out_of_order: Planned requests made in another order than recorded, because others were missing.
        foreign: Requests of threads that never marked a phase.
        outside: Requests of other threads outside of a phase, and requests that can't be planned because they are on
            another stream or in a memory pool.
        live_bytes: Bytes of the arena in use.
        peak_live_bytes: Largest number of bytes of the arena in use at any time.
        live_blocks: Number of planned blocks in use.
        arena_bytes: Size of the arena; 0 if there is none.
        bad_frees: Frees of arena addresses at which no block was in use. It is 0 unless there is a bug.
    """

    hits: int
    fitted: int
    miss_size: int
    miss_end: int
    miss_overlap: int
    unplanned: int
    served_bytes: int
    missed_bytes: int
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
        return self.displaced + self.unplanned - self.fitted

    @property
    def displaced(self) -> int:
        """Requests that have no place, or whose place is in use: they are fitted into the arena, or delegated."""
        return self.miss_size + self.miss_end + self.miss_overlap

    @property
    def served(self) -> int:
        """Requests inside a phase that the arena served."""
        return self.hits + self.fitted


class PlannedAllocator:
    """Serves the memory requests of a training step at the offsets of a plan.

    It is installed in front of PyTorch's own allocator and delegates to it every request that it does not serve. A
    request without a place, or whose place is in use, gets free bytes as far up in the arena as possible. A plan that
    does not match the requests costs speed, never correctness, because a block is served only if all of its bytes are
    free.

    A process has one such allocator per device type, which all objects for this type share.

    Args:
        device: A CPU, or the CUDA device whose current stream is recorded and served; without an index, the current
            CUDA device.

    Raises:
        BuildError: The library can't be compiled, because there is no compiler or this version of torch is not
            supported.
        ValueError: The device is neither a CPU nor a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"no planned allocator for device {str(device)!r}: use a CPU or a CUDA device")
        self._library = AllocatorLibrary(device.type)
        self._device = device
        # Looked up once, because they are called at every phase marker.
        self._phase = self._library.phase
        self._leave = self._library.leave

    @property
    def installed(self) -> bool:
        """Whether PyTorch currently uses this allocator."""
        return bool(self._library.call("memo_installed"))

    def install(self) -> None:
        """Install the allocator in front of PyTorch's, unless it is installed. Existing blocks stay valid.

        Raises:
            RuntimeError: The allocator in use can't be wrapped.
        """
        self._library.call("memo_install")

    def uninstall(self) -> None:
        """Let PyTorch's allocator serve all requests again, if this one is installed. Existing blocks stay valid.

        On CUDA, this one stays in front of PyTorch's, which it only delegates to, while blocks from between exist:
        PyTorch's allocator would ignore `record_stream` on them.
        """
        self._library.call("memo_uninstall")

    def idle(self) -> None:
        """Delegate all requests."""
        self._library.call("memo_idle")

    def record(self, min_bytes: int) -> None:
        """Delegate all requests and record those inside of phases. Earlier events are dropped.

        Args:
            min_bytes: Size below which requests are not recorded.

        Raises:
            ValueError: `min_bytes` is negative.
        """
        _check_min_bytes(min_bytes)
        self._library.call("memo_record", self._device_index(), min_bytes)

    def serve(
        self,
        phases: Sequence[tuple[np.ndarray, np.ndarray]],
        arena_bytes: int,
        min_bytes: int,
        in_turn: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Load a plan and serve requests from it. The arena is allocated unless the existing one is large enough.

        Blocks of an earlier plan stay in place. Requests for the bytes that they occupy get others until they are free.

        Args:
            phases: For each phase the sizes and the offsets of its requests, in bytes. A negative offset leaves the
                request to PyTorch's allocator. Offsets are multiples of 64 on a CPU and of 512 on CUDA.
            arena_bytes: Size of the arena, which may be more than the plan needs.
            min_bytes: Size below which requests are not planned.
            in_turn: For each phase and request, whether it gets its offset only directly after the request before it;
                the same for all requests of a size in a phase. By default, none does.

        Raises:
            ValueError: The plan can't be served; the previous one stays in force.
            RuntimeError: There is no memory for the arena, or blocks are in use in one that is too small.
        """
        _check_min_bytes(min_bytes)
        if arena_bytes <= 0:
            raise ValueError(f"arena_bytes={arena_bytes} is not positive: give the size of the arena in bytes")
        for index, (sizes, offsets) in enumerate(phases):
            if len(sizes) != len(offsets):
                raise ValueError(f"phase {index}: {len(sizes)} sizes, but {len(offsets)} offsets")
        counts = np.array([len(sizes) for sizes, _ in phases], np.int64)
        sizes = _joined([sizes for sizes, _ in phases])
        offsets = _joined([offsets for _, offsets in phases])
        flags = np.zeros(len(sizes), np.int8) if in_turn is None else _joined(in_turn).astype(np.int8)
        addresses = (array.ctypes.data for array in (counts, sizes, offsets, flags))
        self._library.call("memo_serve", self._device_index(), min_bytes, arena_bytes, len(phases), *addresses)

    def phase(self, index: int) -> None:
        """Begin phase `index`, or begin it again. The calling thread enters the planned computation.

        All threads of the process share the current phase.

        Args:
            index: Number of the phase, from 0. A phase that the plan does not have has no planned requests.
        """
        self._phase(index)

    def leave(self) -> None:
        """End the phase for all threads. The calling thread leaves the planned computation."""
        self._leave()

    def take_events(self) -> np.ndarray:
        """Return the events recorded so far, an array of type `EVENT`, and delete them. Recording continues."""
        return self._library.take_events()

    def stats(self) -> AllocatorStats:
        """Return the counters."""
        return AllocatorStats(*self._library.stats(len(fields(AllocatorStats))))

    def reset_stats(self) -> None:
        """Reset all counters to 0, except those of blocks in use, which also become the new peak."""
        self._library.call("memo_reset_stats")

    def release(self) -> bool:
        """Stop serving and free the arena, immediately or when the last planned block is freed.

        Returns:
            Whether the arena has been freed.
        """
        return bool(self._library.call("memo_release"))

    def _device_index(self) -> int:
        if self._device.type == "cpu":
            return 0
        return torch.cuda.current_device() if self._device.index is None else self._device.index


def _check_min_bytes(min_bytes: int) -> None:
    if min_bytes < 0:
        raise ValueError(f"min_bytes={min_bytes} is negative: give 0 or more bytes")


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(array, np.int64) for array in arrays)])
