"""Finds what code reads by name, so that it may be state of a layer, and the namespaces that hold it."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol

from lightning_memo.engine.state.held_values import NOTHING, are_tensors
from lightning_memo.engine.state.user_objects import LIBRARIES, TRUSTED
from lightning_memo.utils.python_objects import contents_of, dict_of, package_of, slots_of, variables_of

_MOST_FUNCTIONS = 1024  # that are read


def functions_in(code: object) -> Iterator[FunctionType]:
    """Yield the functions that run if a function, method, descriptor or partial of these is called."""
    while code is not None:
        if type(code) is FunctionType:
            yield code
        code = _inner(code)


def _inner(code: Any) -> Any:
    kind = type(code)
    if issubclass(kind, (MethodType, staticmethod, classmethod)):
        return code.__func__
    if issubclass(kind, (functools.partial, functools.partialmethod, functools.cached_property)):
        return code.func
    return (dict_of(code) or {}).get("__wrapped__")  # of decorators, and of `functools.lru_cache`


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of global variables and attributes that code uses, functions inside it included.

    Strings in code that calls `globals()` may be names.
    """
    strings = (each for each in code.co_consts if type(each) is str and each.isidentifier())
    named = frozenset(strings) if "globals" in code.co_names else frozenset()
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return named.union(code.co_names, *inner)


def is_of_users(module: str, packages: frozenset[str] = frozenset()) -> bool:
    """Return whether code is a user's: of a package that is no library, or one of some packages.

    Args:
        module: The name of its module.
        packages: Packages that are a user's although they are installed, as they define a layer.
    """
    package = module.partition(".")[0]
    if package in LIBRARIES or package in TRUSTED:
        return False
    return package in packages or not _is_installed(package)


@functools.lru_cache(maxsize=1024)
def _is_installed(package: str) -> bool:
    """Return whether a package is installed among other libraries."""
    variables = variables_of(sys.modules.get(package))
    file = variables.get("__file__") or next(iter(variables.get("__path__", ())), "")
    paths = sysconfig.get_paths()
    return bool(file) and file.startswith((paths["purelib"], paths["platlib"], site.getusersitepackages()))


class NamesOfCode:
    """Reads what functions, and the functions and classes that these name, use by name. Code of libraries is left out.

    Args:
        packages: Packages that are a user's although they are installed, as they define a layer.
        look_into: Called with each value, and with a name for it.

    Attributes:
        found: What names stand for.
        classes: The classes that were met.
    """

    def __init__(self, packages: frozenset[str], look_into: Callable[[Any, str], None]) -> None:
        self.found: list[HeldNames] = []
        self.classes: dict[type, None] = {}
        self._packages, self._look_into = packages, look_into
        self._waiting: deque[Any] = deque()
        self._seen: set[tuple[int, ...]] = set()  # ids of functions' code and globals, and of modules

    def add(self, code: Any) -> None:
        """Note a function, a class or a descriptor that is to be read."""
        self._waiting.append(code)

    def read(self) -> None:
        """Read what was noted, and what it names."""
        while self._waiting and len(self._seen) < _MOST_FUNCTIONS:
            code = self._waiting.popleft()
            kind = type(code)
            if issubclass(kind, type):
                self._read_class(code)
                continue
            if issubclass(kind, property):
                self._waiting += (each for each in (code.fget, code.fset, code.fdel) if each is not None)
                continue
            if issubclass(kind, (MethodType, functools.partial)):
                bound = code.__self__ if kind is MethodType else (code.args, code.keywords)
                self._look_into(bound, "an argument")
            for function in functions_in(code):
                self._read_function(function)

    def _read_class(self, kind: type) -> None:
        for c in kind.__mro__:
            if c not in self.classes and is_of_users(package_of(c), self._packages):
                self.classes[c] = None
                for name, value in vars(c).items():
                    self._look_into(value, f"{c.__name__}.{name}")

    def _read_function(self, function: FunctionType) -> None:
        code, variables = function.__code__, function.__globals__
        defaults = function.__defaults__, function.__kwdefaults__
        if not self._is_new(id(code), id(variables), *map(id, defaults), *map(id, function.__closure__ or ())):
            return
        self._look_into((*defaults, vars(function)), function.__qualname__)
        module = str(variables.get("__name__"))
        if not is_of_users(module, self._packages):  # a decorator's, for example
            self._waiting += (each for each in contents_of(function) if type(each) is FunctionType)
            return
        names = names_in(code)
        # Also names of which there is no variable yet: the function may make it.
        self._note(HeldNames.of(module, Globals(variables), tuple(sorted(names))), names)
        if function.__closure__:
            owner = function.__qualname__.rpartition(".<locals>")[0]
            self._note(HeldNames.of(owner, Closure(function), code.co_freevars), names)

    def _note(self, held: HeldNames, names: frozenset[str]) -> None:
        self.found.append(held)
        for name, value in held.before.items():
            if value is NOTHING:
                value = sys.modules.get(name, NOTHING)  # a function may import it
            if not issubclass(type(value), ModuleType):  # without asking the object for its class
                self._look_into(value, f"{held.owner}.{name}")
                continue
            variables = variables_of(value)
            module = str(variables.get("__name__"))
            if is_of_users(module, self._packages) and self._is_new(id(value), *map(hash, names)):
                used = tuple(sorted(name for name in names if name in variables))
                self._note(HeldNames.of(module, Globals(variables), used), names)

    def _is_new(self, *ids: int) -> bool:
        new = ids not in self._seen
        self._seen.add(ids)
        return new


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
