"""The C++ library of the planned allocator, compiled on first use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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
_ARGUMENTS: Final = {
    "memo_phase": [_INT32],
    "memo_record": [_INT32, _INT64],
    "memo_serve": [_INT32, _INT64, _INT64, _INT64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS],
    "memo_take_events": [_ADDRESS, _INT64],
    "memo_stats": [_ADDRESS],
}
_RESULTS: Final = {
    "memo_error": ctypes.c_char_p,
    "memo_event_count": _INT64,
    "memo_take_events": _INT64,
    **dict.fromkeys(("memo_phase", "memo_leave", "memo_idle", "memo_stats", "memo_reset_stats")),  # none
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
        self._functions = native.load(name, sources, flags)
        # Phase markers are so short that releasing the GIL would take longer than the call.
        short = native.load(name, sources, flags, keep_gil=True)
        for functions in (self._functions, short):
            for function, arguments in _ARGUMENTS.items():
                getattr(functions, function).argtypes = arguments
            for function, result in _RESULTS.items():
                getattr(functions, function).restype = result
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
