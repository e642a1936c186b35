"""What the code of a layer reads by name, looked for once, as that takes some milliseconds."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from lightning_memo.engine.state.names_of_code import Globals, HeldNames, Namespace
from lightning_memo.engine.state.python_state import Generator, PythonState, is_generator
from lightning_memo.engine.state.user_objects import is_of_a_library
from lightning_memo.utils.python_objects import functions_held

_NUMBERS = frozenset({bool, int, float, complex, str})


class NamedValues(NamedTuple):
    """Names in the code of a layer.

    Attributes:
        generators: The generators that objects hold which the code names.
        generator_names: Names that stand for generators, with their namespaces.
        numbers: Global variables that stand for numbers, flags or strings: the module, its namespace, and the names.
        functions: Global variables that stand for functions of users, or for containers of functions.
    """

    generators: list[Generator]
    generator_names: list[tuple[Namespace, str]]
    numbers: list[tuple[str, Namespace, tuple[str, ...]]]
    functions: list[tuple[Namespace, str]]

    def present_numbers(self) -> list[HeldNames]:
        """Return the numbers that the names stand for now."""
        found = (
            HeldNames(owner, space, {name: value for name in names if type(value := space.get(name)) in _NUMBERS})
            for owner, space, names in self.numbers
        )
        return [held for held in found if held.before]

    def present_functions(self) -> list[Any]:
        """Return the functions that the names stand for now."""
        return [function for space, name in self.functions for function in functions_held(space.get(name))]


def _may_be_replaced(value: Any) -> bool:
    """Return whether users may put another function here. They leave those of libraries as they are."""
    found = functions_held(value)
    return bool(found) and (found[0] is not value or not is_of_a_library(value))


_KNOWN: WeakKeyDictionary[nn.Module, NamedValues] = WeakKeyDictionary()


def named_values(layer: nn.Module) -> NamedValues:
    """Return what the code of a layer reads by name, as it was when it was first asked for."""
    if layer not in _KNOWN:
        state = PythonState(layer, (), named=True)
        values = [(held.namespace, name, value) for held in state.named for name, value in held.before.items()]
        generators = [(space, name) for space, name, value in values if is_generator(value)]
        numbers = (
            (held.owner, held.namespace, tuple(n for n, value in held.before.items() if type(value) in _NUMBERS))
            for held in state.named
            if isinstance(held.namespace, Globals)  # variables of closures may hold the layer
        )
        functions = [
            (held.namespace, name)
            for held in state.named
            for name, value in held.before.items()
            if isinstance(held.namespace, Globals) and _may_be_replaced(value)
        ]
        _KNOWN[layer] = NamedValues(state.generators, generators, [each for each in numbers if each[2]], functions)
    return _KNOWN[layer]
