"""Functions of other packages that are replaced for the calls that one thread makes inside a context.

A module or a class has one function for the whole process. What stands in its place therefore asks which thread calls:
models in other threads, among them those that this package does not train, get the function itself.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

Function = Callable[..., Any]
_Key = tuple[int, str]
_INHERITED: Final = object()

_lock = threading.Lock()
_standing: dict[_Key, _StandIn] = {}
# Of the context of a thread; the mappings are never changed.
_replacements: ContextVar[Mapping[_Key, Function] | None] = ContextVar("replaced_functions", default=None)


@contextmanager
def replaced(owner: Any, name: str, replacement: Function, chained: bool = True) -> Iterator[None]:
    """Inside this context, calls of a function by this thread go to another one, which gets the function first.

    Args:
        owner: The module or the class that has the function.
        name: Its name there.
        replacement: Called with the function and the arguments of the call; those of a method begin with the object.
        chained: Whether the function that it gets is what an outer context has put there, if there is one.
    """
    key, before = (id(owner), name), _replacements.get() or {}
    outer = before.get(key)
    if chained and outer is not None and outer is not replacement:
        replacement = functools.partial(_with_outer, replacement, outer)
    with _lock:
        standing = _standing.get(key)
        if standing is None or not (standing.users or standing.fits):
            standing = _standing[key] = _StandIn(owner, name)
        standing.enter()
    token = _replacements.set({**before, key: replacement})
    try:
        yield
    finally:
        _replacements.reset(token)
        with _lock:
            standing.leave()


def function_of(owner: Any, name: str) -> Function:
    """Return the function of a module or a class, also while it is replaced."""
    with _lock:
        standing = _standing.get((id(owner), name))
        function: Function = standing.own if standing is not None and standing.users else getattr(owner, name)
        return function


def _with_outer(replacement: Function, outer: Function, own: Function, *args: Any, **kwargs: Any) -> Any:
    return replacement(functools.partial(outer, own), *args, **kwargs)


class _StandIn:
    """Stands in the place of a function while any thread replaces it, and is used again the next time.

    Attributes:
        users: Number of contexts that replace the function.
        own: The function.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.users = 0
        self._owner, self._name, key = owner, name, (id(owner), name)
        self._before = vars(owner).get(name, _INHERITED)
        bound = isinstance(inspect.getattr_static(owner, name), (staticmethod, classmethod))
        own: Function = getattr(owner, name)  # of a class, a method gets the object as its first argument
        self.own = own

        @functools.wraps(own)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            replacement = (_replacements.get() or {}).get(key)
            return own(*args, **kwargs) if replacement is None else replacement(own, *args, **kwargs)

        self._stand_in = staticmethod(stand_in) if bound else stand_in

    @property
    def fits(self) -> bool:
        """Whether the function is still the one for which this object was made."""
        return vars(self._owner).get(self._name, _INHERITED) is self._before

    def enter(self) -> None:
        """Begin a context that replaces the function."""
        if not self.users:
            setattr(self._owner, self._name, self._stand_in)
        self.users += 1

    def leave(self) -> None:
        """End a context. The last one puts the function back."""
        self.users -= 1
        if self.users:
            return
        if self._before is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
