"""Ctrl-C ends a command with a line, whenever it comes."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from types import TracebackType
from typing import Any

from lightning_memo.cli.launch import is_first_process

_AGAIN_SECONDS = 0.02


def heed() -> None:
    """Makes an interrupt end this process, by its signal as shells expect, without a traceback.

    Python raises an interrupt where the main thread happens to be. In a destructor or a callback of a weak reference it
    ignores all exceptions; there, the signal is sent again.
    """
    sys.excepthook, sys.unraisablehook = _tell, _send_again


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif is_first_process():
        print("interrupted", file=sys.stderr)  # noqa: T201


def _send_again(ignored: Any) -> None:
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
    else:
        _thread.start_new_thread(_send, ())  # a `threading.Thread` takes locks that the main thread may hold


def _send() -> None:
    time.sleep(_AGAIN_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
