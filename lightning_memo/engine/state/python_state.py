"""What a layer's forward may read and write apart from the values of tensors: attributes, containers and objects.

Modules that a layer gets as arguments, or holds without owning them, are looked into like objects. Where asked for, so
is what the code of a layer reads by name.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.state.held_values import NOTHING, ClassAttributes, Held, name_of
from lightning_memo.engine.state.names_of_code import HeldNames, NamesOfCode, Slots
from lightning_memo.engine.state.user_objects import attributes_of, classes_of, is_users
from lightning_memo.utils.containers import Array, Container, array_of, copied, entries_of, size_of
from lightning_memo.utils.python_objects import package_of, slots_of

Generator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator
# The owner of a tensor (the name of one that is no module), its attribute, and the tensor.
HeldTensor = tuple[nn.Module | str, str, Tensor]
_CONTAINERS = (dict, list, set, deque)
_MODULE_TABLES = frozenset(vars(nn.Module()))
# Tables of a module that decide what its forward computes.
_READ_TABLES = (
    *("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
_DEPTH = 8  # of containers and objects within those that a module holds
LONGEST = 1024  # containers that hold more are not looked into
MOST_COPIED = 2**16  # values of a tensor or array of which a copy is kept
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CODE = (
    *(type, FunctionType, MethodType, staticmethod, classmethod, property),
    *(functools.partial, functools.partialmethod, functools.cached_property, functools._lru_cache_wrapper),
)


class PythonState:
    """What the attributes of a layer's modules and of their classes hold.

    Also what the containers and objects among its modules' attributes and among its arguments hold.

    Args:
        layer: The layer.
        arguments: Its arguments.
        named: Whether to look up what the code of a layer reads by name: global variables and those of closures, in all
            functions that it names, apart from those of libraries. It takes some milliseconds.

    Attributes:
        tensors: The tensors among all these. Those that a tuple or a set holds, and in which no other can be put in
            their place, have the name of an owner.
        generators: The generators of random numbers that are held.
        named: What the code of the layer reads by name.
    """

    def __init__(self, layer: nn.Module, arguments: Any, named: bool = False) -> None:
        self.tensors: list[HeldTensor] = []
        self.generators: list[Generator] = []
        self.named: list[HeldNames] = []
        self._held: list[Held] = []
        self._elsewhere: list[Held | HeldNames] = []  # neither attributes nor arguments
        self._notes: list[Any] = self._held
        self._empty: list[tuple[nn.Module, dict[str, Any]]] = []
        self._seen = set(map(id, layer.modules()))
        self._code = _names_of(layer, self._look_into_named) if named else None
        kinds: dict[type, None] = {}
        for module in layer.modules():
            self._note_module(module, _DEPTH)
            kinds.update(dict.fromkeys(classes_of(type(module))))
        self._classes = ClassAttributes(kinds)
        self._look_into(arguments, "an argument", "", _DEPTH)
        others: dict[type, None] = {}
        if self._code is not None:
            self._notes = self._elsewhere
            self._code.read()
            self.named = self._code.found
            self._elsewhere += self.named
            others = {kind: None for kind in self._code.classes if kind not in kinds}
            self._code = None  # which knows this object: tensors would live until garbage is collected
        self._other_classes = ClassAttributes(others)

    def _note_module(self, module: nn.Module, depth: int) -> None:
        own = vars(module)
        self._note(module, "", own)
        self._note_code(type(module))
        for table in map(own.__getitem__, _READ_TABLES):
            if table:
                self._note(module, "", table)
            else:
                self._empty.append((module, table))
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._note_code(hook)
        for key, p in module._parameters.items():
            if p is not None:
                self._note_tensor(module, key, p)
                if vars(p) or type(p) is not nn.Parameter:  # weights of bitsandbytes have attributes
                    self._note(module, key, vars(p))
                    for each in vars(p).values():
                        if not issubclass(type(each), Tensor):  # sums of gradients, for example
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
        if issubclass(kind, _CODE):
            return self._note_code(value)
        if issubclass(kind, tuple):
            inner: Any = value
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
            inner = value
        elif is_users(kind):
            owner = kind.__name__ if isinstance(owner, str) else owner
            inner = self._note_object(value, owner, key)
        else:
            if is_generator(value):
                self.generators.append(value)
            return None
        self._seen.add(id(value))
        if issubclass(kind, (tuple, set)):
            owner, key = name_of(owner, key), ""
        if depth and size_of(inner) <= LONGEST:
            for each in entries_of(inner):
                if type(each) not in _PLAIN:
                    self._look_into(each, owner, key, depth - 1)
        return None

    def _look_into_named(self, value: Any, name: str) -> None:
        if type(value) not in _PLAIN:
            self._look_into(value, name, "", _DEPTH)

    def _note(self, owner: nn.Module | str, key: str, container: Container) -> None:
        self._notes.append(Held(owner, key, container, copied(container)))

    def _note_object(self, value: Any, owner: nn.Module | str, key: str) -> list[Any]:
        """Note the attributes and slots of an object, and return what they hold."""
        self._note_code(type(value))
        attributes, names = attributes_of(value) or {}, tuple(slots_of(type(value)))
        if attributes:
            self._note(owner, key, attributes)
        if not names:
            return list(attributes.values())
        slots = HeldNames.of(type(value).__name__, Slots(value), names)
        self._elsewhere.append(slots)
        return [*attributes.values(), *(held for held in slots.before.values() if held is not NOTHING)]

    def _note_code(self, code: Any) -> None:
        if self._code is not None:
            self._code.add(code)

    def _note_array(self, owner: nn.Module | str, key: str, array: Array) -> None:
        self._seen.add(id(array))
        plain = array_of(array)
        if plain.size <= MOST_COPIED and plain.flags.writeable:
            self._notes.append(Held(owner, key, array, plain.copy()))

    def _note_tensor(self, owner: nn.Module | str, key: str, t: Tensor) -> None:
        """Note a tensor. Its values are no part of this."""
        self.tensors.append((owner, key, t))

    def first_written(self) -> str:
        """Return the name of something that has changed; empty if nothing has.

        Caches in global variables do not count: what is computed again is in them already.
        """
        added = [name_of(module, next(iter(table))) for module, table in self._empty if table]
        classes = self._classes.changed() + self._other_classes.changed()
        added += [f"the class attribute {kind.__name__}.{name}" for kind, name in classes]
        elsewhere = (held.first_changed for held in self._elsewhere if held.changed and not held.only_filled)
        return next(filter(None, (*(held.first_changed for held in self._held), *added, *elsewhere)), "")

    @property
    def fills(self) -> bool:
        """Whether a cache among global variables got tensors."""
        return any(held.changed and held.only_filled for held in self._elsewhere)

    def gained(self) -> list[Tensor]:
        """Return the tensors that were put into what is neither an attribute nor an argument."""
        values = [held.gained() for held in self._elsewhere if held.changed]
        return [t for t in tree_leaves([*values, self._other_classes.gained()]) if issubclass(type(t), Tensor)]

    def restore(self) -> None:
        """Undo what has changed."""
        self._classes.restore()
        self._other_classes.restore()
        for _, table in self._empty:
            table.clear()
        for held in (*self._held, *self._elsewhere):
            if held.changed:
                held.restore()


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator whose state can be restored."""
    # Not `isinstance`, which asks the object for its class: stand-ins of a proof must not be used.
    return issubclass(type(value), Generator) and not issubclass(type(value), random.SystemRandom)


def _names_of(layer: nn.Module, look_into: Callable[[Any, str], None]) -> NamesOfCode:
    return NamesOfCode(frozenset(package_of(type(module)) for module in layer.modules()), look_into)
