"""What a layer's modules and arguments hold apart from the values of tensors: attributes, containers and objects.

Copies of these show what has changed, and undo it. Modules that a layer holds without owning them are objects, too.
What code reaches by names (global variables, closures, attributes of classes) is not looked for.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_memo.engine.state.users_code import attributes_of
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.containers import Container, copied, entries_of, holds_other, refill, size_of

Generator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator
_CONTAINERS = (dict, list, set, deque)
_MODULE_TABLES = frozenset(vars(nn.Module()))
# Tables of a module that decide what its forward computes.
_READ_TABLES = (
    *("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
_DEPTH = 8  # of containers and objects within those that a module holds
LONGEST = 1024  # containers that hold more are not looked into
MOST_KEPT = 2**16  # entries of a container, or values of a tensor, of which a copy is kept
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NOTHING = object()


class HeldTensor(NamedTuple):
    """A tensor that a module or an object holds.

    Attributes:
        owner: The module, or the name of what else holds it, for example of a tuple, in which it cannot be replaced.
        key: The attribute that holds it.
        tensor: The tensor.
    """

    owner: nn.Module | str
    key: str
    tensor: Tensor

    @property
    def name(self) -> str:
        """The name of the attribute, for messages."""
        return name_of(self.owner, self.key)

    @property
    def is_copied(self) -> bool:
        """Whether a recomputation can replace it by a copy: small tensors of modules, which are not trained."""
        t = self.tensor
        return (
            type(t) is Tensor and isinstance(self.owner, nn.Module) and not t.requires_grad and not t.is_inference()
            and t.layout is torch.strided and t.numel() <= MOST_KEPT
        )  # fmt: skip


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
        return holds_other(self.container, self.before)

    @property
    def first_changed(self) -> str:
        """Name of something in it that has changed; empty if nothing has."""
        before, name = self.before, name_of(self.owner, self.key)
        if not self.changed:
            return ""
        if not isinstance(before, dict):
            return f"a {type(self.container).__name__} of {name}"
        now: Any = copied(self.container)
        keys = (key for key in {**now, **before} if now.get(key, _NOTHING) is not before.get(key, _NOTHING))
        return next((f"{name}.{_word(key)}" for key in keys), "")

    def present(self) -> Held:
        """Return what the container holds now."""
        return self._replace(before=copied(self.container))

    def restore(self) -> None:
        """Let it hold the same again."""
        refill(self.container, self.before)


class HeldState:
    """What the attributes of a layer's modules hold, and the containers and objects among these and its arguments.

    Args:
        layer: The layer.
        arguments: Its arguments.

    Attributes:
        tensors: The tensors among all these.
        generators: The generators of random numbers among them.
    """

    def __init__(self, layer: nn.Module, arguments: Any) -> None:
        self.tensors: list[HeldTensor] = []
        self.generators: list[Generator] = []
        self._held: list[Held] = []
        self._empty: list[tuple[nn.Module, dict[str, Any]]] = []
        self._seen = set(map(id, layer.modules()))
        for module in layer.modules():
            self._note_module(module, _DEPTH)
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
        # Not `isinstance`, which asks the object for its class: proxies and stand-ins of a proof must not be used.
        kind = type(value)
        if issubclass(kind, Tensor):
            return self._note_tensor(owner, key, value)
        inner: Any = value
        if not issubclass(kind, tuple):
            if id(value) in self._seen:
                return None
            self._seen.add(id(value))
            if issubclass(kind, nn.Module):
                return self._note_module(value, depth - 1) if depth else None
            attributes = attributes_of(value)
            if issubclass(kind, _CONTAINERS):
                self._note(owner, key, value)
            elif attributes is not None:
                owner = kind.__name__ if isinstance(owner, str) else owner
                inner = attributes
            else:
                if is_generator(value):
                    self.generators.append(value)
                return None
            if attributes:  # of an object, or of a container of a user's class
                self._note(owner, key, attributes)
        if issubclass(kind, (tuple, set)):
            owner, key = name_of(owner, key), ""
        if depth and size_of(inner) <= LONGEST:
            for each in entries_of(inner):
                if type(each) not in _PLAIN:
                    self._look_into(each, owner, key, depth - 1)
        return None

    def _note(self, owner: nn.Module | str, key: str, container: Container) -> None:
        if size_of(container) <= MOST_KEPT:
            self._held.append(Held(owner, key, container, copied(container)))

    def _note_tensor(self, owner: nn.Module | str, key: str, t: Tensor) -> None:
        """Note a tensor. Its values are no part of this."""
        self.tensors.append(HeldTensor(owner, key, t))

    def first_written(self) -> str:
        """Return the name of something that has changed; empty if nothing has."""
        added = (name_of(module, next(iter(table))) for module, table in self._empty if table)
        return next(filter(None, (*(held.first_changed for held in self._held), *added)), "")

    def restore(self) -> None:
        """Undo what has changed."""
        for _, table in self._empty:
            table.clear()
        for held in self._held:
            if held.changed:
                held.restore()


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator whose state can be restored."""
    return issubclass(type(value), Generator) and not issubclass(type(value), random.SystemRandom)


def name_of(owner: nn.Module | str, key: str) -> str:
    """Return the name of an attribute, for messages."""
    name = owner if isinstance(owner, str) else class_name(owner)
    return f"{name}.{key}" if key else name


def _word(key: object) -> str:
    """Return a key for a message."""
    return str(key) if type(key) in _PLAIN else f"[{type(key).__name__}]"
