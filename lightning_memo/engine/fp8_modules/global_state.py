"""TransformerEngine's state of the process: the autocast that is active, and the histories that it updates together."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

PACKAGE: Final = "transformer_engine"
# The second one before 2.9.
_MODULES: Final = (f"{PACKAGE}.pytorch.quantization", f"{PACKAGE}.pytorch.fp8")
FIRST: Final = (2, 15)
LAST: Final = (2, 20)
# What a recomputation uses of TransformerEngine. None of it is public API.
MANAGER_NAMES: Final = ("quantization_state", "is_fp8_enabled", "is_fp8_calibration", "get_autocast_state",
                        "set_autocast_state", "autocast_enter", "get_fp8_recipe")  # fmt: skip
STATE_NAMES: Final = ("autocast_depth", "is_first_fp8_module", "fp8_graph_capturing")


def fp8_manager() -> Any | None:
    """Return TransformerEngine's `FP8GlobalStateManager`; `None` if its modules were not imported."""
    found = (getattr(sys.modules.get(name), "FP8GlobalStateManager", None) for name in _MODULES)
    return next((manager for manager in found if manager is not None), None)


def is_in_fp8() -> bool:
    """Return whether TransformerEngine's modules compute in FP8 now, or note maxima for it."""
    manager = fp8_manager()
    return manager is not None and bool(manager.is_fp8_enabled() or manager.is_fp8_calibration())


def engine_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules of TransformerEngine in a module, those of derived classes, too."""
    return [m for m in module.modules() if any(c.__module__.partition(".")[0] == PACKAGE for c in type(m).__mro__)]


def why_other_version() -> str:
    """Return why the installed TransformerEngine cannot be used as the known one; empty if it can."""
    version = str(getattr(sys.modules.get(PACKAGE), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not FIRST <= (int(numbers[1]), int(numbers[2])) <= LAST:
        first, last = (".".join(map(str, release)) for release in (FIRST, LAST))
        return f"releases {first} to {last} are known, and {version or 'one without a version'} is installed"
    manager = fp8_manager()
    state = getattr(manager, "quantization_state", None)
    missing = [name for name in MANAGER_NAMES if not hasattr(manager, name)]
    missing += [f"quantization_state.{name}" for name in STATE_NAMES if not hasattr(state, name)]
    return f"FP8GlobalStateManager of release {version} has no {missing[0]}" if missing else ""


class NotedGlobalState:
    """A copy of the state of the process, to which it can return.

    Runs of a layer beside its forward must neither take the flag of the first module, whose backward updates the
    histories, nor leave entries in the lists of histories.
    """

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Take the present state in place of the earlier one."""
        self._manager = fp8_manager()
        self._state = getattr(self._manager, "quantization_state", None)
        fields_of_state = () if self._state is None else _fields_of(self._state)
        self._values = {name: _copied(getattr(self._state, name)) for name in fields_of_state}

    def restore(self) -> None:
        """Make this state the present one."""
        if self._state is not None:
            assert self._manager is not None
            self._manager.quantization_state = self._state
            for name, value in self._values.items():
                setattr(self._state, name, _copied(value))


@contextlib.contextmanager
def autocast_again(autocast: Any) -> Iterator[None]:
    """Make an earlier autocast the active one inside the context, and restore the state of the process afterwards.

    The autocast is not entered: the end of one outside of all others updates the histories, which the forward did.

    Args:
        autocast: What `FP8GlobalStateManager.get_autocast_state` has returned in it.
    """
    manager, noted = fp8_manager(), NotedGlobalState()
    assert manager is not None
    manager.set_autocast_state(autocast)
    manager.quantization_state.autocast_depth += 1  # nor does the end of one inside
    try:
        yield
    finally:
        noted.restore()


def _fields_of(state: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(state):  # with slots
        return tuple(field.name for field in dataclasses.fields(state))
    return tuple(vars(state))


def _copied(value: Any) -> Any:
    """Return a value with copies of the containers that it consists of. Tensors stay the same."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, deque):
        return type(value)(_copied(each) for each in value)
    return value
