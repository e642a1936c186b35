"""Runs layers as they were written: functions that are compiled with `torch.compile` are not compiled inside.

Compiled code would have the engine's hooks, modes and attention traced as a part of it, or would not call them at all.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

# The stance of the compiler is one for all threads: the first that enters sets it, and the last one sets it back.
_lock = threading.Lock()
_inside = 0
_stance: Any = None


def run_eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside of which nothing is compiled, and which no compiled code traces."""
    if "torch._dynamo" not in sys.modules:  # without which nothing is compiled
        return function(*args, **kwargs)
    return _untraced()(function, *args, **kwargs)


@functools.cache
def _untraced() -> Callable[..., Any]:
    untraced: Callable[..., Any] = torch.compiler.disable(_run_eagerly)  # which imports the compiler
    return untraced


def _run_eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _inside, _stance
    with _lock:
        if _inside == 0:
            _stance = torch.compiler.set_stance("force_eager")
        _inside += 1
    try:
        return function(*args, **kwargs)
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _stance.__exit__(None, None, None)
                _stance = None
