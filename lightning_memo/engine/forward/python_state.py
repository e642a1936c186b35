"""What a layer's forward may read and write apart from the values of tensors: attributes, containers and objects.

Modules that a layer gets as arguments, or holds without owning them, are looked into like objects.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_memo.utils.class_names import class_name

Array = np.ndarray[Any, Any]
Generator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator
Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any] | Array
# The owner of a tensor (the name of one that is no module), its attribute, and the tensor.
HeldTensor = tuple[nn.Module | str, str, Tensor]
_CONTAINERS = (dict, list, set, deque)
_NOTHING = object()
_MODULE_TABLES = frozenset(vars(nn.Module()))
# Tables of a module that decide what its forward computes.
_READ_TABLES = (
    *("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
_PYTHONS_OWN = "_abc_impl"  # attribute of classes
_DEPTH = 3  # of containers and objects within those that a module holds
LONGEST = 1024  # containers that hold more are not looked into
MOST_COPIED = 2**16  # values of a tensor or array of which a copy is kept
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type, type(None), FunctionType})
# Objects of these are no state of a layer, for example FSDP's, which changes between forward and backward.
_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "accelerate", "lightning_memo"} | (
    sys.stdlib_module_names - {"types", "argparse"}
)


class Held(NamedTuple):
    """What a container held, or what the attributes of an object did.

    Attributes:
        owner: The module or the name of the object that holds the container.
        key: The attribute that holds it; empty for the attributes of the owner themselves.
        container: The container.
        before: A copy of it.
    """

    owner: nn.Module | str
    key: str
    container: Container
    before: Container

    @property
    def changed(self) -> bool:
        """Whether it holds anything else now."""
        container, before = self.container, self.before
        if isinstance(container, np.ndarray) or isinstance(before, np.ndarray):
            return not _same_bytes(container, before)
        if len(container) != len(before):
            return True
        if isinstance(container, dict) and isinstance(before, dict):
            same = all(map(operator.is_, container, before))
            return not (same and all(map(operator.is_, container.values(), before.values())))
        if isinstance(container, set):  # a copy may have another order
            return set(map(id, container)) != set(map(id, before))
        return not all(map(operator.is_, container, before))

    @property
    def first_changed(self) -> str:
        """Name of something in it that has changed; empty if nothing has."""
        container, before, name = self.container, self.before, name_of(self.owner, self.key)
        if isinstance(container, dict) and isinstance(before, dict):
            keys = {**container, **before}
            changed = (key for key in keys if container.get(key, _NOTHING) is not before.get(key, _NOTHING))
            return next((f"{name}.{key}" for key in changed), "")
        if not self.changed:
            return ""
        return name if isinstance(container, np.ndarray) else f"a {type(container).__name__} of {name}"

    def restore(self) -> None:
        """Let it hold the same again."""
        refill(self.container, self.before)


def refill(container: Container, values: Any) -> None:
    """Let a container hold other values."""
    if isinstance(container, np.ndarray):
        container[...] = values
        return
    if isinstance(container, dict):  # classes may forbid `update`
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        kind.update(container, values)
        return
    container.clear()
    if isinstance(container, set):
        container.update(values)
    else:
        container.extend(values)


def copied(container: Container) -> Container:
    """Return a plain container that holds the same. Classes may have other constructors."""
    if isinstance(container, np.ndarray):
        return container.copy()
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, set):
        return set(container)
    return deque(container, container.maxlen) if isinstance(container, deque) else list(container)


def _same_bytes(container: Any, before: Any) -> bool:
    return bool(container.shape == before.shape and container.tobytes() == before.tobytes())


def name_of(owner: nn.Module | str, key: str) -> str:
    """Return the name of an attribute, for messages."""
    name = owner if isinstance(owner, str) else class_name(owner)
    return f"{name}.{key}" if key else name


@functools.lru_cache(maxsize=1024)
def is_users(kind: type) -> bool:
    """Return whether objects of a class have attributes, and are no state of a library."""
    if not kind.__dictoffset__ or issubclass(kind, (nn.Module, type)):
        return False
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def attributes_of(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's class, which may be state of a layer; `None` for other objects."""
    if not is_users(type(value)):
        return None
    try:  # a proxy has the attributes of something else
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # a property of this name
        return None
    return attributes if type(attributes) is dict else None


class ClassAttributes:
    """What classes hold, which users may set for a part of a step. Objects that they hold are not looked into.

    Args:
        kinds: The classes.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._before = {kind: dict(vars(kind)) for kind in kinds}

    def changed(self) -> list[tuple[type, str]]:
        """Return the classes and the names of attributes that have changed."""
        return [
            (kind, name)
            for kind, before in self._before.items()
            for name in before.keys() | vars(kind).keys()
            if vars(kind).get(name, _NOTHING) is not before.get(name, _NOTHING)
            and not (name.startswith("__") or name == _PYTHONS_OWN)
        ]

    def present(self) -> ClassAttributes:
        """Return what the same classes hold now."""
        return ClassAttributes(self._before)

    def restore(self) -> None:
        """Undo what has changed."""
        for kind, name in self.changed():
            value: Any = self._before[kind].get(name, _NOTHING)
            if value is _NOTHING:
                delattr(kind, name)
            else:
                setattr(kind, name, value)


@functools.lru_cache(maxsize=1024)
def _classes_of(kind: type) -> tuple[type, ...]:
    """Return a class and those from which it is derived, apart from those of libraries."""
    return tuple(c for c in kind.__mro__ if c.__module__.partition(".")[0] not in _LIBRARIES)


class PythonState:
    """What the attributes of a layer's modules and of their classes hold.

    Also what the containers and objects among its modules' attributes and among its arguments hold.

    Args:
        layer: The layer.
        arguments: Its arguments.

    Attributes:
        tensors: The tensors among all these. Those that a tuple or a set holds, and in which no other can be put in
            their place, have the name of an owner.
        generators: The generators of random numbers that are held.
    """

    def __init__(self, layer: nn.Module, arguments: Any) -> None:
        self.tensors: list[HeldTensor] = []
        self._held: list[Held] = []
        self._empty: list[tuple[nn.Module, dict[str, Any]]] = []
        self._seen = set(map(id, layer.modules()))
        self.generators: list[Generator] = []
        kinds: dict[type, None] = {}
        for module in layer.modules():
            self._note_module(module, _DEPTH)
            kinds.update(dict.fromkeys(_classes_of(type(module))))
        self._classes = ClassAttributes(kinds)
        self._look_into(arguments, "an argument", "", _DEPTH)

    def _note_module(self, module: nn.Module, depth: int) -> None:
        own = vars(module)
        self._note(module, "", own)
        for table in map(own.__getitem__, _READ_TABLES):
            if table:
                self._note(module, "", table)
            else:
                self._empty.append((module, table))
        for key, p in module._parameters.items():
            if p is not None:
                self._note_tensor(module, key, p)
                if vars(p) or type(p) is not nn.Parameter:  # weights of bitsandbytes have attributes
                    self._note(module, key, vars(p))
                    for each in vars(p).values():
                        if not isinstance(each, Tensor):  # sums of gradients, for example
                            self._look_into(each, module, key, depth)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                self._note_tensor(module, key, buffer)
        for key, value in own.items():
            if type(value) not in _PLAIN and key not in _MODULE_TABLES:
                self._look_into(value, module, key, depth)

    def _look_into(self, value: Any, owner: nn.Module | str, key: str, depth: int) -> None:
        """Note a container or an object, and what it holds."""
        kind = type(value)
        if issubclass(kind, Tensor):
            return self._note_tensor(owner, key, value)
        if issubclass(kind, tuple):
            inner: Collection[Any] = value
        elif id(value) in self._seen:
            return None
        elif issubclass(kind, np.ndarray):
            return self._note_array(owner, key, value)
        elif issubclass(kind, nn.Module):
            self._seen.add(id(value))
            return self._note_module(value, depth - 1) if depth else None
        elif issubclass(kind, _CONTAINERS):
            self._note(owner, key, value)
            if attributes := attributes_of(value):
                self._note(owner, key, attributes)
            inner = value.values() if issubclass(kind, dict) else value
        elif (attributes := attributes_of(value)) is not None:
            owner = kind.__name__ if isinstance(owner, str) else owner
            self._note(owner, key, attributes)
            inner = attributes.values()
        else:
            # Not `isinstance`, which asks the object for its class: stand-ins of a proof must not be used.
            if issubclass(kind, Generator) and not issubclass(kind, random.SystemRandom):
                self.generators.append(value)
            return None
        self._seen.add(id(value))
        if issubclass(kind, (tuple, set)):
            owner, key = name_of(owner, key), ""
        if depth and len(inner) <= LONGEST:
            for each in inner:
                if type(each) not in _PLAIN:
                    self._look_into(each, owner, key, depth - 1)
        return None

    def _note(self, owner: nn.Module | str, key: str, container: Container) -> None:
        self._held.append(Held(owner, key, container, copied(container)))

    def _note_array(self, owner: nn.Module | str, key: str, array: Array) -> None:
        self._seen.add(id(array))
        if array.size <= MOST_COPIED and array.flags.writeable:
            self._held.append(Held(owner, key, array, array.copy()))

    def _note_tensor(self, owner: nn.Module | str, key: str, t: Tensor) -> None:
        """Note a tensor. Its values are no part of this."""
        self.tensors.append((owner, key, t))

    def first_written(self) -> str:
        """Return the name of something that has changed; empty if nothing has."""
        added = [name_of(module, next(iter(table))) for module, table in self._empty if table]
        added += [f"the class attribute {kind.__name__}.{name}" for kind, name in self._classes.changed()]
        return next(filter(None, (*(held.first_changed for held in self._held), *added)), "")

    def restore(self) -> None:
        """Undo what has changed."""
        self._classes.restore()
        for _, table in self._empty:
            table.clear()
        for held in self._held:
            if held.changed:
                held.restore()


def copy_containers(tree: Any) -> Any:
    """Return arguments in which every dict and list is another one, which holds the same."""
    if type(tree) in (dict, list):
        values = tree.items() if isinstance(tree, dict) else enumerate(tree)
        copied = {name: copy_containers(value) for name, value in values}
        return copied if isinstance(tree, dict) else list(copied.values())
    if type(tree) is tuple:
        return tuple(map(copy_containers, tree))
    return tree
