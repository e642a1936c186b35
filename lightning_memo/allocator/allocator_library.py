"""The C functions of the planned allocator, compiled on first use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from lightning_memo.utils import native_build as native

MALLOC: Final = 0
FREE: Final = 1

# One recorded request; csrc/recorder.h has the same fields.
# kind: MALLOC or FREE. phase: -1 outside of any. sequence: a malloc's number within its phase, -1 if it can't be
# planned (another stream); for a free, how many such mallocs the phase had before it. thread: numbers from 0 in the
# order in which threads were first seen. id: pairs a malloc with its free. size: bytes. stream: the stream's handle, 0
# on the CPU and for frees. ns: of the steady clock.
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
    "memo_serve": [_INT32, _INT64, _INT64, _INT64, _ADDRESS, _ADDRESS, _ADDRESS],
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
    """The allocator's functions for one type of device.

    Each process has one such library per type, and it stays loaded: blocks that it handed out may outlive everything
    else.

    Args:
        device_type: "cpu" or "cuda".

    Raises:
        BuildError: the library can't be built.
    """

    def __init__(self, device_type: str) -> None:
        name = f"allocator_{device_type}"
        sources = [native.SOURCE_FOLDER / f"{name}.cpp"]
        if device_type == "cuda" and torch.version.cuda is None:
            raise native.BuildError(f"torch {torch.__version__} is built without CUDA: install a build that has it")
        flags = native.torch_flags(cuda=device_type == "cuda")
        self._functions = native.load(name, sources, flags)
        # Markers are so short that giving up the interpreter's lock would cost more than the call.
        short = native.load(name, sources, flags, keep_gil=True)
        for functions in (self._functions, short):
            for function, arguments in _ARGUMENTS.items():
                getattr(functions, function).argtypes = arguments
            for function, result in _RESULTS.items():
                getattr(functions, function).restype = result
        self.phase: Callable[[int], object] = short.memo_phase
        self.leave: Callable[[], object] = short.memo_leave

    def call(self, name: str, *arguments: int) -> int:
        """Calls a function, and raises what it reports.

        Raises:
            ValueError: the plan can't be served.
            RuntimeError: any other failure.
        """
        result = int(getattr(self._functions, name)(*arguments) or 0)
        if result < 0:
            kind = ValueError if result == _WRONG_PLAN else RuntimeError
            raise kind(self._functions.memo_error().decode())
        return result

    def stats(self, count: int) -> list[int]:
        """The counters, in the order of csrc/allocator_core.h."""
        values = np.zeros(count, np.int64)
        self._functions.memo_stats(values.ctypes.data)
        return [int(value) for value in values]

    def take_events(self) -> np.ndarray:
        """All events so far, which are then forgotten."""
        events = np.zeros(self.call("memo_event_count"), EVENT)
        taken = self.call("memo_take_events", events.ctypes.data, len(events))
        return events[:taken]
