"""What may decide what a module computes apart from tensors: its flags, functions, numbers, and small objects of these.

Callbacks and hooks change them while training. They are read in each call of a layer, so they are read fast: attributes
of libraries' objects, long containers, and objects within objects are left out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_memo.engine.state.users_code import (
    GLOBAL_HOOKS,
    attributes_of,
    hook_tables,
    hooks_of_users,
    is_of_a_library,
    is_users,
)
from lightning_memo.utils.python_objects import contents_of

_TABLES = frozenset(vars(nn.Module())) - {"training"}
_NUMBERS = frozenset({int, float, str})
_PLAIN = _NUMBERS | {bool}
_CONTAINERS = frozenset({list, tuple, set, dict})
_FUNCTIONS = frozenset({FunctionType, MethodType, BuiltinFunctionType, functools.partial})
_LONGEST = 64


@dataclass(frozen=True, slots=True)
class ModuleAttributes:
    """The attributes of some modules, without the names of the attributes.

    Attributes:
        modules: Names and classes of the modules, names of their buffers, and shapes of their parameters.
        switches: Flags, functions and hooks by their code, and classes of objects, which have few values each.
        numbers: Numbers, strings, and those in containers.
        inner: Numbers and strings in objects and in closures of functions.
    """

    modules: tuple[object, ...]
    switches: tuple[object, ...]
    numbers: tuple[object, ...]
    inner: tuple[object, ...]

    @classmethod
    def of(cls, named_modules: Iterable[tuple[str, nn.Module]]) -> ModuleAttributes:
        """Read the attributes of some modules.

        Args:
            named_modules: The modules, with their names.
        """
        modules: list[object] = []
        found = _Found()
        found.add_hooks(GLOBAL_HOOKS)
        for name, m in named_modules:
            modules += name, type(m), *m._buffers
            modules += [p.shape for p in m._parameters.values() if p is not None]
            found.add([value for key, value in m.__dict__.items() if key not in _TABLES], found.numbers)
            found.add_called(type(m))
            found.add_hooks(hook_tables(m))
        return cls(tuple(modules), tuple(found.switches), tuple(found.numbers), tuple(found.inner))


class _Found:
    def __init__(self) -> None:
        self.switches: list[object] = []
        self.numbers: list[object] = []
        self.inner: list[object] = []
        self._seen: set[int] = set()

    def add(self, values: Iterable[Any], numbers: list[object]) -> None:
        """Add the values of attributes.

        Args:
            values: The attributes of a module, or of an object of a module.
            numbers: Gets the numbers among them: `self.numbers` for a module, `self.inner` for an object.
        """
        for value in values:
            kind = type(value)
            if kind is bool:
                self.switches.append(value)
            elif kind in _NUMBERS:
                numbers.append(value)
            elif kind in _CONTAINERS:
                numbers += _plain_in(value)
                self._add_functions(_values_of(value))
            elif kind in _FUNCTIONS:
                self._add_function(value)
            elif numbers is not self.inner and is_users(kind) and id(value) not in self._seen:
                self._seen.add(id(value))
                self.switches.append(kind)
                self.add((attributes_of(value) or {}).values(), self.inner)

    def add_called(self, kind: type) -> None:
        """Add the functions that the forward of a user's class finds in global variables, also in containers."""
        variables, names = _names_in_forward(kind)
        for value in map(variables.get, names):
            if type(value) in _CONTAINERS:
                self._add_functions(_values_of(value))
            elif type(value) in _FUNCTIONS and not is_of_a_library(value):
                self._add_function(value)

    def add_hooks(self, tables: list[dict[int, Any]]) -> None:
        """Add hooks of users."""
        for kind, hook in hooks_of_users(tables):
            self.switches += (kind, type(hook))
            self._add_functions([hook])

    def _add_functions(self, values: Iterable[Any]) -> None:
        """Add those of some values that are functions."""
        for value in values:
            if type(value) in _FUNCTIONS:
                self._add_function(value)

    def _add_function(self, function: Any) -> None:
        """Add the code of a function, not the function: users may make it anew from the same code in each step."""
        while (kind := type(function)) is functools.partial or kind is MethodType:
            if kind is functools.partial:
                self.inner += (*_plain_in(function.args), *_plain_in(function.keywords))
                function = function.func
            else:
                function = function.__func__
        if kind is FunctionType:
            self.switches.append(function.__code__)
            for held in (function.__defaults__, function.__kwdefaults__, contents_of(function)):
                if held:
                    self.inner += _plain_in(held)
        else:
            self.switches.append(getattr(function, "__qualname__", kind))


@functools.lru_cache(maxsize=1024)
def _names_in_forward(kind: type) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the global variables that the forward of a class can see, and the names in its code; libraries' have none.

    What the functions that it calls find by names is left out.
    """
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    if type(forward) is not FunctionType or is_of_a_library(forward):
        return {}, ()
    return forward.__globals__, forward.__code__.co_names


def _plain_in(container: Any) -> list[object]:
    """Return the plain values in a container that is not long, and plain keys."""
    values = _values_of(container)
    keys = container if values and type(container) is dict else ()
    return [value for value in (*keys, *values) if type(value) in _PLAIN]


def _values_of(container: Any) -> Collection[Any]:
    """Return what a list, tuple, set or dict that is not long holds, without keys."""
    if len(container) > _LONGEST:
        return ()
    values: Collection[Any] = container.values() if type(container) is dict else container
    return values
