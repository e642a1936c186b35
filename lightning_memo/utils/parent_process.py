"""Child processes that end when their parent process ends."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final

_ATTEMPTS: Final = 100  # to remove a folder


def exit_with_parent(folder: Path | None = None) -> threading.Thread:
    """Start a daemon thread that kills this process as soon as its parent process has ended.

    Args:
        folder: Temporary folder to remove first, because the parent can no longer remove it.

    Returns:
        The thread. It never ends before the process does.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        attempts = _ATTEMPTS
        while folder is not None and folder.exists() and attempts:  # other threads may be writing a file
            shutil.rmtree(folder, ignore_errors=True)
            attempts -= 1
        os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=watch, name="parent process", daemon=True)
    thread.start()
    return thread
