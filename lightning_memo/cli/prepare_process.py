"""Prepares the process of a command: its end after Ctrl-C, torch's log level, and the garbage of its imports."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import time
from types import TracebackType
from typing import Any

from lightning_memo.utils.process import is_rank_zero

_DELAY_SECONDS = 0.02


def prepare_process() -> None:
    """Make Ctrl-C end this process with one line, and hide torch's warnings about memory freed in measured steps.

    torch reads its log level when it is imported. Child processes inherit it. Garbage is not collected until
    `finish_imports`, because imports leave little garbage and many objects, which each collection would look at.
    """
    # In a measured step, torch warns about each freed buffer that was allocated earlier, which is harmless.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _exit_on_interrupt()
    gc.disable()


def finish_imports() -> None:
    """Collect garbage again, but only among objects that are created from now on."""
    gc.freeze()
    gc.enable()


def _exit_on_interrupt() -> None:
    """Makes an interrupt end this process without a traceback, by the signal itself as shells expect.

    Python raises `KeyboardInterrupt` wherever the main thread is. Python ignores all exceptions in destructors and in
    callbacks of weak references; an interrupt that was ignored there is sent again.
    """
    sys.excepthook, sys.unraisablehook = _report_interrupt, _send_again


def _report_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif is_rank_zero():
        print("interrupted", file=sys.stderr)  # noqa: T201


def _send_again(ignored: Any) -> None:
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
    else:
        _thread.start_new_thread(_send, ())  # a `threading.Thread` needs locks that the main thread may hold


def _send() -> None:
    time.sleep(_DELAY_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
