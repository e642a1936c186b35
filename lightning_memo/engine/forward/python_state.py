"""Attributes and containers that a layer's forward may write, apart from tensors that it changes in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memo.utils.class_names import class_name

_Container = dict[Any, Any] | list[Any] | set[Any]
# An attribute: the module's dotted name, its own name, and between them that of the object or parameter that holds it.
Place = tuple[str, ...]
_NOTHING = object()
_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, buffers, hooks: other parts of the engine see to them


@dataclass(frozen=True, slots=True)
class _Held:
    """What a container held, or what the attributes of an object did.

    Attributes:
        label: Name for messages.
        place: The container's place, or that of the attributes' owner; `None` for arguments.
        is_owner: Whether these are attributes.
        container: The container.
        before: A copy of it.
    """

    label: str
    place: Place | None
    is_owner: bool
    container: _Container
    before: _Container

    def changed(self) -> list[Any]:
        """Return the keys of a dict whose values have changed, or the type of another container that has."""
        container, before = self.container, self.before
        if isinstance(container, dict) and isinstance(before, dict):
            keys = {**container, **before}
            return [key for key in keys if container.get(key, _NOTHING) is not before.get(key, _NOTHING)]
        alike = len(container) == len(before) and all(a is b for a, b in zip(container, before, strict=True))
        return [] if alike else [type(container).__name__]


class PythonState:
    """What the attributes of a layer's modules hold, and the containers and objects among these and its arguments.

    Args:
        layer: The layer.
        arguments: Its arguments.
    """

    def __init__(self, layer: nn.Module, arguments: Any) -> None:
        self._held: list[_Held] = []
        for path, module in layer.named_modules():
            name = class_name(module)
            self._note(name, (path,), vars(module))
            for key, value in [*vars(module).items(), *module._parameters.items()]:
                if _has_attributes(value) or issubclass(type(value), nn.Parameter):
                    self._note(f"{name}.{key}", (path, key), vars(value))
        for container in _containers(arguments):
            self._note("an argument", None, container)
        for leaf in tree_leaves(arguments):
            if _has_attributes(leaf):
                self._note(type(leaf).__name__, None, vars(leaf))

    def _note(self, label: str, place: Place | None, holder: _Container) -> None:
        self._held.append(_Held(label, place, True, holder, holder.copy()))
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if issubclass(type(value), (dict, list, set)):
                inner = None if place is None else (*place, key)
                self._held.append(_Held(label, inner, False, value, value.copy()))

    def first_written(self) -> str:
        """Return the name of something that has changed; empty if nothing has."""
        for held in self._held:
            if changed := held.changed():
                is_dict = isinstance(held.container, dict)
                return f"{held.label}.{changed[0]}" if is_dict else f"a {changed[0]} of {held.label}"
        return ""

    def written_attributes(self) -> tuple[Place, ...]:
        """Return the attributes of modules, and of objects and parameters that these hold, that have changed."""
        found: set[Place] = set()
        for held in self._held:
            if held.place is not None and (changed := held.changed()):
                found |= {(*held.place, key) for key in changed} if held.is_owner else {held.place}
        return tuple(sorted(place for place in found if len(place) > 2 or place[1] not in _OF_MODULES))

    def restore(self) -> None:
        """Undo what has changed."""
        for held in self._held:
            if held.changed():
                _refill(held.container, held.before)


def _refill(container: _Container, values: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(values)
    else:
        container.update(values)


def _has_attributes(value: object) -> bool:
    """Return whether a value is an object of a user's class, which a forward may write to."""
    kind = type(value)  # attributes of the value itself may be out of bounds
    return bool(kind.__dictoffset__) and not issubclass(kind, (Tensor, nn.Module, type)) and not callable(value)


class AttributeValues:
    """Values of some attributes before a layer's forward, which its recomputation gets again.

    Args:
        layer: The layer.
        places: The attributes.
    """

    def __init__(self, layer: nn.Module, places: Iterable[Place]) -> None:
        self._values = []
        for path, *owners, name in places:
            holder: Any = layer.get_submodule(path)
            for owner in owners:
                holder = getattr(holder, owner, None)
            if not hasattr(holder, "__dict__"):
                continue  # the object is no longer there
            holder = vars(holder)
            value = holder.get(name, _NOTHING)
            # Another container, which the forward does not write, and no graph of an earlier step.
            value = value.detach() if isinstance(value, Tensor) else copy_containers(value)
            self._values.append((holder, name, value))

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Set the values inside the context, and put the present ones back afterwards."""
        present = [(holder, name, holder.get(name, _NOTHING)) for holder, name, _ in self._values]
        _set(self._values)
        try:
            yield
        finally:
            _set(present)


def _set(values: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    for holder, name, value in values:
        if value is _NOTHING:
            holder.pop(name, None)
        else:
            holder[name] = value


def copy_containers(tree: Any) -> Any:
    """Return arguments in which every dict and list is another one, which holds the same."""
    if type(tree) in (dict, list):
        values = tree.items() if isinstance(tree, dict) else enumerate(tree)
        copied = {name: copy_containers(value) for name, value in values}
        return copied if isinstance(tree, dict) else list(copied.values())
    if type(tree) is tuple:
        return tuple(map(copy_containers, tree))
    return tree


def _containers(tree: Any) -> Iterator[_Container]:
    if isinstance(tree, (dict, list)):
        yield tree
    if isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(value)
