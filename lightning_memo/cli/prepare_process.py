"""Prepares the process of a command: before and after it imports torch and Lightning, which takes seconds."""

from __future__ import annotations

import gc
import os

from lightning_memo.cli.interrupts import exit_on_interrupt


def prepare_process() -> None:
    """Make Ctrl-C end this process with one line, and hide torch's warnings about memory freed in measured steps.

    torch reads its log level when it is imported. Child processes inherit it. Garbage is not collected until
    `finish_imports`, because imports leave little garbage and many objects, which each collection would look at.
    """
    # In a measured step, torch warns about each freed buffer that was allocated earlier, which is harmless.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    exit_on_interrupt()
    gc.disable()


def finish_imports() -> None:
    """Collect garbage again, but only among objects that are created from now on."""
    gc.freeze()
    gc.enable()
