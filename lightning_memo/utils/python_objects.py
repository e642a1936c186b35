"""What Python objects hold besides their attributes, read without calling methods and properties of their classes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any


def contents_of(function: FunctionType) -> list[object]:
    """Return the values of the variables of other functions that a function reads; `None` for those without a value."""
    found: list[object] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is still empty
            found.append(None)
    return found


@functools.lru_cache(maxsize=1024)
def slots_of(kind: type) -> Mapping[str, MemberDescriptorType]:
    """Return the slots of a class by their names."""
    slotted = (vars(c) for c in reversed(kind.__mro__) if "__slots__" in vars(c))
    return {name: value for own in slotted for name, value in own.items() if type(value) is MemberDescriptorType}


def in_slots(value: object) -> dict[str, object]:
    """Return what the slots of an object hold, by their names. Those that are empty are left out."""
    kind: type = type(value)
    found: dict[str, object] = {}
    for name, slot in slots_of(kind).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue
    return found


@functools.lru_cache(maxsize=1024)
def _dict_slot_of(kind: type) -> Any:
    """Return what reads the attributes of the objects of a class; `None` if they have none."""
    found = (vars(c).get("__dict__") for c in kind.__mro__)
    return next((slot for slot in found if type(slot) in (GetSetDescriptorType, MemberDescriptorType)), None)


def dict_of(value: object) -> dict[str, Any] | None:
    """Return the attributes that an object has itself, also where its class computes others; `None` if it has none."""
    kind: type = type(value)
    slot = _dict_slot_of(kind)
    try:  # a proxy has the attributes of something else, which may be missing
        attributes = None if slot is None else slot.__get__(value)
    except Exception:
        return None
    return attributes if type(attributes) is dict else None


def package_of(kind: type) -> str:
    """Return the package in which a class is defined; empty if it does not tell."""
    module = type.__getattribute__(kind, "__module__")
    return module.partition(".")[0] if type(module) is str else ""
