"""Ctrl-C ends a command with one line, no matter where it interrupts the program."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from types import TracebackType
from typing import Any

from lightning_memo.utils.process_rank import is_rank_zero

_DELAY_SECONDS = 0.02


def exit_on_interrupt() -> None:
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
