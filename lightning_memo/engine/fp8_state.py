"""TransformerEngine's FP8 state, to which a recomputation returns: that of the process, and the scales of its modules.

The state of the process is the autocast that is active, and the histories that it updates together. Kernels read and
write the scales and maxima of modules past PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

PACKAGE: Final = "transformer_engine"


# The second one before 2.9.
_MODULES: Final = (f"{PACKAGE}.pytorch.quantization", f"{PACKAGE}.pytorch.fp8")
FIRST: Final = (2, 15)
LAST: Final = (2, 20)


# What a recomputation uses of TransformerEngine. None of it is public API.
MANAGER_NAMES: Final = (
    "quantization_state",
    "is_fp8_enabled",
    "is_fp8_calibration",
    "get_autocast_state",
    "set_autocast_state",
    "autocast_enter",
    "get_fp8_recipe",
)
STATE_NAMES: Final = ("autocast_depth", "is_first_fp8_module", "fp8_graph_capturing")
_FORWARD_KEY: Final = "scaling_fwd"
_KEYS: Final = (_FORWARD_KEY, "scaling_bwd")
_TENSORS: Final = ("scale", "amax_history")


def fp8_manager() -> Any | None:
    """Return TransformerEngine's `FP8GlobalStateManager`; `None` if its modules were not imported."""
    found = (getattr(sys.modules.get(name), "FP8GlobalStateManager", None) for name in _MODULES)
    return next((manager for manager in found if manager is not None), None)


def is_in_fp8() -> bool:
    """Return whether TransformerEngine's modules compute in FP8 now, or note maxima for it."""
    manager = fp8_manager()
    return manager is not None and bool(manager.is_fp8_enabled() or manager.is_fp8_calibration())


def te_modules(module: nn.Module) -> list[nn.Module]:
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


class _NotedGlobalState:
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


@contextlib.contextmanager
def _autocast_again(autocast: Any) -> Iterator[None]:
    """Make an earlier autocast the active one inside the context, and restore the state of the process afterwards.

    The autocast is not entered: the end of one outside of all others updates the histories, which the forward did.

    Args:
        autocast: What `FP8GlobalStateManager.get_autocast_state` has returned in it.
    """
    manager, noted = fp8_manager(), _NotedGlobalState()
    assert manager is not None
    manager.set_autocast_state(autocast)
    manager.quantization_state.autocast_depth += 1  # nor does the end of one inside
    try:
        yield
    finally:
        noted.restore()


class Fp8State:
    """The FP8 state of the process and of a layer or model before a run of it, which must leave nothing behind.

    Args:
        module: The layer or model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = te_modules(module) if fp8_manager() is not None else []
        self._process = _NotedGlobalState() if self._modules else None
        self._scales = _NotedScales(self._modules)

    def note(self) -> None:
        """Take the present state in place of the earlier one."""
        if self._process is not None:
            self._process.note()
            self._scales.note()

    def restore(self) -> None:
        """Make this state the present one. The attributes of the modules are restored by others."""
        if self._process is not None:
            self._process.restore()
            self._scales.restore()


class _NotedScales:
    """Copies of the scales and histories of maxima of some modules. Recipes without a history have none.

    Args:
        modules: Modules of TransformerEngine.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._copies: dict[int, Tensor] = {}
        self._noted: list[tuple[Any, str, Tensor]] = []
        self.note()

    @torch.inference_mode()  # tensors that were made in it, for example by a validation, are written nowhere else
    def note(self) -> None:
        """Take the present values in place of the earlier ones, in the same memory where it suffices."""
        self._noted = [found for m in self._modules for key in _KEYS for found in _tensors_of(m, key)]
        present = [t for _, _, t in self._noted]
        before, self._copies = self._copies, {}
        for t in present:
            copy = before.get(id(t))
            fits = copy is not None and copy.shape == t.shape and copy.device == t.device
            self._copies[id(t)] = copy if copy is not None and fits else torch.empty_like(t)
        if present:
            torch._foreach_copy_([self._copies[id(t)] for t in present], present)  # type: ignore[misc]

    @torch.inference_mode()
    def restore(self) -> None:
        """Put the noted values into the tensors that held them."""
        for holder, name, t in self._noted:
            if getattr(holder, name) is not t:  # quantizers refer to it
                setattr(holder, name, t)
        if self._noted:
            held = [t for _, _, t in self._noted]
            torch._foreach_copy_(held, [self._copies[id(t)] for t in held])  # type: ignore[misc]


class ForwardFp8:
    """The autocast and the scales with which a forward of a layer computes, for its recomputation.

    The histories are noted by each call, not by TransformerEngine's own recomputation phase: that hands out its copies
    in the order of the forwards, one for each call of a module, while backwards run in another order, are left out, or
    end as soon as they have what they need.

    Args:
        modules: The modules of TransformerEngine in the layer.

    Attributes:
        pads_scales: Whether rows of scales end with values that no kernel has written, which are others each time.
    """

    @torch.inference_mode()
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        manager = fp8_manager()
        assert manager is not None
        self.pads_scales = is_in_fp8() and type(manager.get_fp8_recipe()).__name__ == "Float8BlockScaling"
        self._modules, self._autocast = modules, manager.get_autocast_state()
        found = [t for m in modules for _, name, t in _tensors_of(m, _FORWARD_KEY) if name == "scale"]
        self._scales = [(t, t.clone()) for t in found]

    @classmethod
    def of(cls, layer: nn.Module) -> ForwardFp8 | None:
        """Note the present state; `None` if a layer has no modules of TransformerEngine."""
        manager = fp8_manager()
        if not hasattr(manager, "get_autocast_state"):  # of an older release, with which FP8 is refused
            return None
        modules = te_modules(layer)
        return cls(modules) if modules else None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Return to the state of the forward inside the context, and to the present one afterwards."""
        present = _NotedScales(self._modules)
        with _autocast_again(self._autocast):
            with torch.inference_mode():
                for t, scale in self._scales:
                    t.copy_(scale)
            try:
                yield
            finally:
                present.restore()


def _tensors_of(module: nn.Module, key: str) -> list[tuple[Any, str, Tensor]]:
    """Return the tensors of a module's state of scaling, each with the object and the name of the attribute."""
    state = getattr(module, "fp8_meta", {}).get(key)
    found = [(state, name, getattr(state, name, None)) for name in _TENSORS]
    return [(holder, name, t) for holder, name, t in found if isinstance(t, Tensor)]
