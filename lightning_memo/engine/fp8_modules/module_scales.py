"""The scales and maxima of TransformerEngine's modules, which kernels read and write past PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_memo.engine.fp8_modules.global_state import (
    NotedGlobalState,
    autocast_again,
    engine_modules,
    fp8_manager,
    is_in_fp8,
)

FORWARD_KEY: Final = "scaling_fwd"
_KEYS: Final = (FORWARD_KEY, "scaling_bwd")
_TENSORS: Final = ("scale", "amax_history")


class NotedScales:
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


class Fp8State:
    """The FP8 state of the process and of a layer or model before a run of it, which must leave nothing behind.

    Args:
        module: The layer or model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = engine_modules(module) if fp8_manager() is not None else []
        self._process = NotedGlobalState() if self._modules else None
        self._scales = NotedScales(self._modules)

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
        found = [t for m in modules for _, name, t in _tensors_of(m, FORWARD_KEY) if name == "scale"]
        self._scales = [(t, t.clone()) for t in found]

    @classmethod
    def of(cls, layer: nn.Module) -> ForwardFp8 | None:
        """Note the present state; `None` if a layer has no modules of TransformerEngine."""
        manager = fp8_manager()
        if not hasattr(manager, "get_autocast_state"):  # of an older release, with which FP8 is refused
            return None
        modules = engine_modules(layer)
        return cls(modules) if modules else None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Return to the state of the forward inside the context, and to the present one afterwards."""
        present = NotedScales(self._modules)
        with autocast_again(self._autocast):
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
