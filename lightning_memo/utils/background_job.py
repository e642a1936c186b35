"""Work that goes on beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


def in_background(work: Callable[[], _Result], name: str, to_its_end: bool = False) -> Future[_Result]:
    """Starts a thread.

    Args:
        work: What it does.
        name: Of the thread.
        to_its_end: Whether a process that ends waits for it: HiGHS aborts a process of which the interpreter is gone
            when it comes back.

    Returns:
        Its result, or its exception, in time.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=not to_its_end).start()
    return future
