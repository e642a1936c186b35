"""What Python objects hold besides their attributes."""

from __future__ import annotations

import functools
from types import FunctionType, MemberDescriptorType


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
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class."""
    slotted = (vars(c) for c in kind.__mro__ if "__slots__" in vars(c))
    return tuple(name for own in slotted for name, value in own.items() if type(value) is MemberDescriptorType)
