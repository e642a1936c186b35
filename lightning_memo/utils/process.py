"""This process among others: its rank before a process group exists, and its end with its parent process."""

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

# Set by torchrun, by Lightning's launcher (within a node, and per node), by SLURM and by LSF.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


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


def is_rank_zero() -> bool:
    """Whether this is the process that prints and writes for all of them. Needs no process group."""
    return all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES)
