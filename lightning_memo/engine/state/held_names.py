"""Names and what they stand for: global variables, variables of closures, and slots of objects."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any, NamedTuple, Protocol

from lightning_memo.engine.state.held_values import NOTHING, are_tensors
from lightning_memo.utils.python_objects import slots_of


class Namespace(Protocol):
    """Holds values by name."""

    def get(self, name: str) -> Any:
        """Return a value, or `NOTHING`."""

    def set(self, name: str, value: Any) -> None:
        """Replace a value; `NOTHING` removes it."""


class Globals:
    """The global variables of a module.

    Args:
        variables: Its `__dict__`.
    """

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables

    def get(self, name: str) -> Any:
        return self._variables.get(name, NOTHING)

    def set(self, name: str, value: Any) -> None:
        if value is NOTHING:
            self._variables.pop(name, None)
        else:
            self._variables[name] = value


class Closure:
    """The variables of other functions that a function reads.

    Args:
        function: The function.
    """

    def __init__(self, function: FunctionType) -> None:
        cells: tuple[CellType, ...] = function.__closure__ or ()
        self._cells = dict(zip(function.__code__.co_freevars, cells, strict=True))

    def get(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # it is empty
            return NOTHING

    def set(self, name: str, value: Any) -> None:
        if value is not NOTHING:
            self._cells[name].cell_contents = value
        elif self.get(name) is not NOTHING:
            del self._cells[name].cell_contents


class Slots:
    """The slots of an object, also where its class is frozen, or has properties of the same names.

    Args:
        owner: The object.
    """

    def __init__(self, owner: object) -> None:
        self._owner, self._slots = owner, slots_of(type(owner))

    def get(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self._owner)
        except AttributeError:
            return NOTHING

    def set(self, name: str, value: Any) -> None:
        if value is not NOTHING:
            self._slots[name].__set__(self._owner, value)
        elif self.get(name) is not NOTHING:
            self._slots[name].__delete__(self._owner)


class HeldNames(NamedTuple):
    """What names of a namespace stood for.

    Attributes:
        owner: The name of the namespace, for messages.
        namespace: The namespace.
        before: The values, by name.
    """

    owner: str
    namespace: Namespace
    before: dict[str, Any]

    @classmethod
    def of(cls, owner: str, namespace: Namespace, names: tuple[str, ...]) -> HeldNames:
        """Return what some names stand for now."""
        return cls(owner, namespace, {name: namespace.get(name) for name in names})

    def _changed(self) -> list[str]:
        return [name for name, value in self.before.items() if self.namespace.get(name) is not value]

    @property
    def changed(self) -> bool:
        """Whether a name stands for something else now."""
        return bool(self._changed())

    @property
    def only_filled(self) -> bool:
        """Whether names that stood for nothing got tensors, and no other has changed, as caches do."""
        values = [self.before[name] for name in self._changed()]
        return all(value is None or value is NOTHING for value in values) and are_tensors(self.gained())

    @property
    def first_changed(self) -> str:
        """The first name that stands for something else now; empty if there is none."""
        return next((f"{self.owner}.{name}" for name in self._changed()), "")

    def present(self) -> HeldNames:
        """Return what the same names stand for now."""
        return self.of(self.owner, self.namespace, tuple(self.before))

    def gained(self) -> list[Any]:
        """Return what names have got since."""
        return [self.namespace.get(name) for name in self._changed()]

    def restore(self) -> None:
        """Let all names stand for the same again."""
        for name in self._changed():
            self.namespace.set(name, self.before[name])
