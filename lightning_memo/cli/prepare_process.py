"""Prepares the process of a command: before and after it imports torch and Lightning, which takes seconds."""

from __future__ import annotations

import gc
import os

from lightning_memo.cli.interrupts import exit_on_interrupt


def prepare_process() -> None:
    """Make Ctrl-C end this process with one line, and hide torch's warnings about memory freed in measured steps.

    torch reads its log level when it is imported. Child processes inherit it. Garbage is not collected until
    `start_process`, because imports leave little garbage and many objects, which each collection would look at.
    """
    # In a measured step, torch warns about each freed buffer that was allocated earlier, which is harmless.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    exit_on_interrupt()
    gc.disable()


def start_process() -> None:
    """Collect garbage again, among the objects that are made from now on. To be called after the imports."""
    gc.freeze()
    gc.enable()
