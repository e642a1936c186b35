"""Work in a thread next to training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


def in_background(work: Callable[[], _Result], name: str, finish_at_exit: bool = False) -> Future[_Result]:
    """Run a function in a new thread.

    Args:
        work: The function.
        name: Name of the thread.
        finish_at_exit: Whether the process waits for the thread when it ends. HiGHS needs this: it aborts the process
            if the interpreter is gone when the solver returns.

    Returns:
        A future of the function's result or exception.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=not finish_at_exit).start()
    return future
