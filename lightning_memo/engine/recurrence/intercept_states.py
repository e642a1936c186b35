"""Intercepts the functions that hand a state from token to token, as attention is intercepted."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_memo.engine.recurrence.state_functions import JOINED_FUNCTIONS, STATE_FUNCTIONS, StateCall

# Computes a call on the tokens that it got.
StateHandler = Callable[[StateCall], Tensor]


@dataclass(frozen=True, slots=True)
class _Handlers:
    hand: StateHandler
    refuse: Callable[[str], None]


# Of the layer that runs in this thread: functions of modules are there for all threads.
_handlers: ContextVar[_Handlers | None] = ContextVar("state_handlers", default=None)
_lock = threading.Lock()


class _Intercepted:
    """Takes the place of a function in the module of transformers whose classes call it by name.

    Attributes:
        function: The function.
        users: Number of layers that run.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function, self.users = function, 0
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handlers = _handlers.get()
        if handlers is None:  # another thread runs a model by itself
            return self.function(*args, **kwargs)
        if self._name in JOINED_FUNCTIONS:
            return None
        call = StateCall(self._name, self.function, args, kwargs)
        if why := call.why_not():
            handlers.refuse(why)
            return self.function(*args, **kwargs)
        return call.returned(handlers.hand(call))


def may_hand_states(model: nn.Module) -> bool:
    """Return whether some module of a model may call a function that hands a state from token to token."""
    return any(_functions_of(type(module)) for module in model.modules())


@contextmanager
def handing(layer: nn.Module, hand: StateHandler, refuse: Callable[[str], None]) -> Iterator[None]:
    """Inside, calls of functions that hand a state from token to token go to `hand`.

    Args:
        layer: The layer that runs.
        hand: Answers the calls.
        refuse: Told why, if the layer calls a function in a way in which no state can be handed.
    """
    places = {(id(home), name): home for m in layer.modules() for home, name in _functions_of(type(m))}
    with _lock:
        held = [(home, name, _intercept(home, name)) for (_, name), home in places.items()]
    before = _handlers.set(_Handlers(hand, refuse))
    try:
        yield
    finally:
        _handlers.reset(before)
        with _lock:
            for home, name, function in held:
                function.users -= 1
                if not function.users:
                    home[name] = function.function


def _intercept(home: dict[str, Any], name: str) -> _Intercepted:
    """Intercept a function, which a layer of another thread, or one whose recomputation runs, may have done already."""
    if not isinstance(home[name], _Intercepted):
        home[name] = _Intercepted(name, home[name])
    function: _Intercepted = home[name]
    function.users += 1
    return function


@functools.cache
def _functions_of(kind: type[nn.Module]) -> tuple[tuple[dict[str, Any], str], ...]:
    """Return the functions that a class of transformers may call: the module's variables, and the name in them."""
    homes = [vars(sys.modules[c.__module__]) for c in kind.__mro__ if c.__module__.startswith("transformers.")]
    return tuple((home, name) for home in homes for name in (*STATE_FUNCTIONS, *JOINED_FUNCTIONS) if name in home)
