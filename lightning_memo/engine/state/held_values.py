"""Containers and attributes of objects and classes: copies of these show what has changed, and undo it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.containers import Container, copied, entries_of, holds_other, refill

NOTHING = object()
_OF_TENSORS = frozenset({tuple, list, dict, OrderedDict, defaultdict})
_DEPTH = 4  # of containers within a cache
_PYTHONS_OWN = "_abc_impl"  # attribute of classes


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
    def only_filled(self) -> bool:
        """Whether a dict got tensors where there was nothing, and nothing else has changed, as in caches."""
        before = self.before
        if not isinstance(before, dict):
            return False
        container: Any = copied(self.container)
        kept = ((key, value) for key, value in before.items() if value is not None)
        return all(container.get(key, NOTHING) is value for key, value in kept) and are_tensors(self.gained())

    @property
    def first_changed(self) -> str:
        """Name of something in it that has changed; empty if nothing has."""
        before, name = self.before, name_of(self.owner, self.key)
        if not self.changed:
            return ""
        if isinstance(before, dict):
            present: Any = copied(self.container)
            keys = (key for key in {**present, **before} if present.get(key, NOTHING) is not before.get(key, NOTHING))
            return next((f"{name}.{_word(key)}" for key in keys), "")
        return name if isinstance(before, np.ndarray) else f"a {type(self.container).__name__} of {name}"

    def present(self) -> Held:
        """Return what the container holds now."""
        return self._replace(before=copied(self.container))

    def gained(self) -> list[Any]:
        """Return what it has got since."""
        before = self.before
        if isinstance(before, np.ndarray):
            return []
        if isinstance(before, dict):
            present: Any = copied(self.container)
            return [value for key, value in present.items() if before.get(key, NOTHING) is not value]
        known = set(map(id, before))
        return [value for value in entries_of(self.container) if id(value) not in known]

    def restore(self) -> None:
        """Let it hold the same again."""
        refill(self.container, self.before)


def are_tensors(values: Iterable[Any]) -> bool:
    """Return whether all values are tensors, or tuples, lists and dicts of such values that are not empty."""
    return all(_is_tensor(value, _DEPTH) for value in values)


def _is_tensor(value: Any, depth: int) -> bool:
    if type(value) not in _OF_TENSORS:
        return issubclass(type(value), Tensor)
    # An empty one may be a count.
    return depth > 0 and bool(value) and all(_is_tensor(each, depth - 1) for each in entries_of(value))


def _word(key: object) -> str:
    """Return a key for a message."""
    return str(key) if type(key) in (str, int, float, bool, type(None)) else f"[{type(key).__name__}]"


def name_of(owner: nn.Module | str, key: str) -> str:
    """Return the name of an attribute, for messages."""
    name = owner if isinstance(owner, str) else class_name(owner)
    return f"{name}.{key}" if key else name


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
            if vars(kind).get(name, NOTHING) is not before.get(name, NOTHING)
            and not (name.startswith("__") or name == _PYTHONS_OWN)
        ]

    def gained(self) -> list[Any]:
        """Return what they have got since."""
        return [vars(kind).get(name) for kind, name in self.changed()]

    def present(self) -> ClassAttributes:
        """Return what the same classes hold now."""
        return ClassAttributes(self._before)

    def restore(self) -> None:
        """Undo what has changed."""
        for kind, name in self.changed():
            value: Any = self._before[kind].get(name, NOTHING)
            if value is NOTHING:
                type.__delattr__(kind, name)
            else:
                type.__setattr__(kind, name, value)  # metaclasses may forbid it
