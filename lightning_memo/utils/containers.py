"""Reads and refills containers by the methods of Python's own classes: those of users' classes may do anything.

Lazy sequences read a file when they are iterated over, and configurations raise if a value is missing.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import ItemsView, Iterable
from typing import Any

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_KINDS: tuple[type, ...] = (dict, list, tuple, set, deque)
_MAXLEN: Any = vars(deque)["maxlen"]


def base_of(kind: type) -> type:
    """Return the class of Python from which the class of a container is derived."""
    if issubclass(kind, OrderedDict):  # knows an order of its own
        return OrderedDict
    return next(base for base in _KINDS if issubclass(kind, base))


def size_of(container: Any) -> int:
    """Return how much a container or a tuple holds."""
    kind = type(container)
    size: int = len(container) if kind in _KINDS else base_of(kind).__len__(container)  # type: ignore[attr-defined]
    return size


def items_of(container: dict[Any, Any]) -> ItemsView[Any, Any]:
    """Return the keys and values of a dict."""
    items: ItemsView[Any, Any] = base_of(type(container)).items(container)  # type: ignore[attr-defined]
    return items


def entries_of(container: Any) -> Iterable[Any]:
    """Return the values of a dict, or what another container or a tuple holds."""
    base: Any = base_of(type(container))
    entries: Iterable[Any] = base.values(container) if issubclass(base, dict) else base.__iter__(container)
    return entries


def copied(container: Container) -> Container:
    """Return a plain container that holds the same."""
    kind = type(container)
    if kind is dict:  # without asking the keys for their hashes
        return container.copy()
    if issubclass(kind, dict):
        return dict(items_of(container))  # type: ignore[arg-type]
    if issubclass(kind, set):
        return set(container)  # which does not iterate over a set
    entries = entries_of(container)
    return deque(entries, _MAXLEN.__get__(container)) if issubclass(kind, deque) else list(entries)


def refill(container: Container, values: Any) -> None:
    """Let a container hold other values, which a plain one holds."""
    base: Any = base_of(type(container))
    base.clear(container)
    if base is OrderedDict:  # whose `update` calls `__setitem__` of a derived class
        for key, value in values.items():
            base.__setitem__(container, key, value)  # type: ignore[index]
    elif issubclass(base, (dict, set)):
        base.update(container, values)
    else:
        base.extend(container, values)


def holds_other(container: Container, before: Container) -> bool:
    """Return whether a container does not hold the very values of its copy."""
    kind = type(container)
    if kind is dict:  # most are, and all of a layer are looked at in each recomputation
        return _other_items(container, container, container.values(), before)  # type: ignore[arg-type, union-attr]
    if issubclass(kind, dict):
        keys = base_of(kind).__iter__(container)  # type: ignore[attr-defined]
        return _other_items(container, keys, entries_of(container), before)  # type: ignore[arg-type]
    if size_of(container) != len(before):
        return True
    if issubclass(kind, set):  # a copy may have another order
        return set(map(id, entries_of(container))) != set(map(id, before))
    return not all(map(operator.is_, entries_of(container), before))


def _other_items(container: dict[Any, Any], keys: Iterable[Any], values: Iterable[Any], before: dict[Any, Any]) -> bool:
    if dict.__len__(container) != len(before):
        return True
    return not (all(map(operator.is_, keys, before)) and all(map(operator.is_, values, before.values())))
