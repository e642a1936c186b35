"""What a layer's forward may read and write apart from the values of tensors: attributes, containers and objects.

Modules that a layer gets as arguments, or holds without owning them, are looked into like objects.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_memo.engine.state.held_values import Array, ClassAttributes, Container, Held, copied, name_of
from lightning_memo.engine.state.user_objects import attributes_of, classes_of

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
_DEPTH = 3  # of containers and objects within those that a module holds
LONGEST = 1024  # containers that hold more are not looked into
MOST_COPIED = 2**16  # values of a tensor or array of which a copy is kept
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type, type(None), FunctionType})


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
            kinds.update(dict.fromkeys(classes_of(type(module))))
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
