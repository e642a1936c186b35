"""Several callbacks as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback


class Together(Callback):
    """Passes each hook on to those callbacks that have it, in order.

    Lightning takes some microseconds for every hook of every callback, which steps of a few milliseconds feel.

    Args:
        callbacks: Those that take part.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for name in vars(Callback):
            hooks = [getattr(c, name) for c in callbacks if getattr(type(c), name) is not getattr(Callback, name)]
            if name.startswith("on_") and hooks:
                setattr(self, name, functools.partial(_call_each, hooks))


def _call_each(hooks: Sequence[Callable[..., Any]], *args: Any) -> None:
    for hook in hooks:
        hook(*args)
