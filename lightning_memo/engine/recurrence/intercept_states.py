"""Intercepts the functions that hand a state from token to token, as attention is intercepted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_memo.engine.recurrence.state_functions import JOINED_FUNCTIONS, STATE_FUNCTIONS, StateCall

# Computes a call on the tokens that it got.
StateHandler = Callable[[StateCall], Tensor]


class _Intercepted:
    """Takes the place of a function in the module of transformers whose classes call it by name."""

    def __init__(
        self, name: str, function: Callable[..., Any], hand: StateHandler, refuse: Callable[[str], None]
    ) -> None:
        self.function = function
        self._name, self._hand, self._refuse = name, hand, refuse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name in JOINED_FUNCTIONS:
            return None
        call = StateCall(self._name, self.function, args, kwargs)
        if why := call.why_not():
            self._refuse(why)
            return self.function(*args, **kwargs)
        return call.returned(self._hand(call))


@contextmanager
def handing(layer: nn.Module, hand: StateHandler, refuse: Callable[[str], None]) -> Iterator[None]:
    """Inside, calls of functions that hand a state from token to token go to `hand`.

    Args:
        layer: The layer that runs.
        hand: Answers the calls.
        refuse: Told why, if the layer calls a function in a way in which no state can be handed.
    """
    found = {(id(home), name): home for m in layer.modules() for home, name in _functions_of(type(m))}
    before = [(home, name, home[name]) for (_, name), home in found.items()]
    for home, name, function in before:
        # A recomputation may run inside that of another slice.
        inner = function.function if isinstance(function, _Intercepted) else function
        home[name] = _Intercepted(name, inner, hand, refuse)
    try:
        yield
    finally:
        for home, name, function in before:
            home[name] = function


@functools.cache
def _functions_of(kind: type[nn.Module]) -> tuple[tuple[dict[str, Any], str], ...]:
    """Return the functions that a class of transformers may call: the module's variables, and the name in them."""
    homes = [vars(sys.modules[c.__module__]) for c in kind.__mro__ if c.__module__.startswith("transformers.")]
    return tuple((home, name) for home in homes for name in (*STATE_FUNCTIONS, *JOINED_FUNCTIONS) if name in home)
