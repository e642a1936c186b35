"""Which layers with TransformerEngine's modules are trained in FP8. All others are refused with one line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from lightning_memo.engine.fp8_modules.global_state import (
    PACKAGE,
    engine_modules,
    fp8_manager,
    is_in_fp8,
    why_other_version,
)
from lightning_memo.utils.class_names import class_name

UNSUPPORTED: Final = "in TransformerEngine's FP8, lightning_memo does not support"
RECIPES: Final = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling")
FP8_WEIGHTS: Final = "with weights in FP8: leave quantized_model_init (fp8_model_init) out"
CLASSES: Final = ("Linear", "LayerNormLinear", "LayerNormMLP")
NORMS: Final = ("LayerNorm", "RMSNorm")  # without quantizers, and with tokens apart
_KNOWN: Final = f"{', '.join((*CLASSES, NORMS[0]))} and {NORMS[1]}"
_TAKE_OTHERS: Final = (
    "take PyTorch's instead, which Lightning's TransformerEnginePrecision keeps with replace_layers=False"
)
# Recipes with which no layer has run on a GPU here.
_NOT_RUN: Final = ("MXFP8BlockScaling",)


class Fp8Check:
    """Refuses layers whose modules of TransformerEngine compute in FP8 in a way that is not supported.

    Args:
        why_not: With which setting layers do not compute in FP8, and what to set; empty if they do.
    """

    def __init__(self, why_not: str) -> None:
        self._why_not = why_not
        self._warned = False

    def check(self, layer: nn.Module) -> None:
        """Refuse a layer that is about to run, and warn once of a recipe that has not run on a GPU.

        Args:
            layer: The layer.

        Raises:
            ValueError: It would run in FP8, and the release, the recipe, a module or a setting is not supported.
        """
        modules = engine_modules(layer) if is_in_fp8() else []
        if not modules:
            return
        if why := why_other_version():
            raise ValueError(
                f"layers in TransformerEngine's FP8 run more than once, which needs its state, but {why}: install a "
                "known one, or leave its autocast out"
            )
        if why := _why_not_recipe():
            raise ValueError(f"{UNSUPPORTED} {why}")
        for m in modules:
            if why := _why_not_module(m):
                raise ValueError(f"{UNSUPPORTED} {class_name(m)} of {class_name(layer)} {why}")
        if self._why_not:
            raise refused_beside(class_name(modules[0]), self._why_not)
        self._warn_of_recipe()

    def _warn_of_recipe(self) -> None:
        if not self._warned and (kind := type(_recipe()).__name__) in _NOT_RUN:
            self._warned = True
            warnings.warn(
                f"lightning_memo: {kind} of TransformerEngine was tested on a CPU, with a stand-in for its kernels, "
                "and has not run on a GPU: compare the first losses with those of plain training.",
                stacklevel=5,
            )


def refused_beside(name: str, why: str) -> ValueError:
    """Return the error for FP8 beside a setting.

    Args:
        name: The class of a module of TransformerEngine, which would run.
        why: The setting, and what to set.
    """
    return ValueError(
        f"{name} is TransformerEngine's and runs in its FP8 autocast, which is not supported with {why}, "
        "or leave the autocast out"
    )


def why_scaled_by_engine(module: nn.Module) -> str:
    """Return why a module runs on all tokens at once, if modules of TransformerEngine in it compute in FP8 now."""
    found = [m for m in engine_modules(module) if not is_norm(m)] if is_in_fp8() else []
    if not found:
        return ""
    what = class_name(found[0]) + ("" if found[0] is module else f" of {class_name(module)}")
    return f"{what} computes in TransformerEngine's FP8, in which tokens may share a scale"


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm of TransformerEngine, which computes each token by itself and without FP8."""
    return _kind_of(module) in NORMS


def fp8_form() -> str:
    """Return by which recipe modules of TransformerEngine compute now; empty if not in FP8."""
    return f"{_recipe()}" if is_in_fp8() else ""


def _recipe() -> Any:
    """Return the recipe of the active autocast."""
    manager = fp8_manager()
    assert manager is not None
    return manager.get_fp8_recipe()


def _why_not_recipe() -> str:
    """Return what is not supported of the active autocast, and what to do; empty if all of it is."""
    manager, recipe = fp8_manager(), _recipe()
    assert manager is not None
    kind = type(recipe).__name__
    if manager.is_fp8_calibration():
        return "calibration, which notes maxima without FP8: leave calibrating out of the autocast"
    if kind not in RECIPES:
        return f"the recipe {kind}: give {', '.join(RECIPES[:-1])} or {RECIPES[-1]}"
    for name in ("fp8_dpa", "fp8_mha", "backward_override"):
        if getattr(recipe, name, None):
            return f"{kind} with {name}={getattr(recipe, name)!r}: leave {name} out"
    if manager.quantization_state.fp8_graph_capturing:
        return "CUDA graphs of TransformerEngine: leave make_graphed_callables out"
    offloads = getattr(sys.modules.get(f"{PACKAGE}.pytorch.cpu_offload"), "is_cpu_offload_enabled", bool)
    if offloads():
        return "activations that TransformerEngine moves to the host: leave get_cpu_offload_context out"
    debugger = getattr(sys.modules.get("transformer_engine.debug.pytorch.debug_state"), "TEDebugState", None)
    return "TransformerEngine's debugger: turn it off" if getattr(debugger, "debug_enabled", False) else ""


def _delays_weight_gradients(m: Any) -> bool:
    store = getattr(m, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


# What each class has, and what is not supported of it.
_UNSUPPORTED: Final[tuple[tuple[str, Callable[[Any], bool]], ...]] = (
    (FP8_WEIGHTS, lambda m: bool(m.primary_weights_in_fp8)),
    (
        "with cached FP8 weights: leave is_first_microbatch out",
        lambda m: bool(m._fp8_workspaces),
    ),
    (
        "with its own tensor or sequence parallelism: leave tp_size, parallel_mode and sequence_parallel out",
        lambda m: m.tp_size > 1 or bool(m.sequence_parallel),
    ),
    (
        "with a weight that another library gathers for each product (DistributedWeight): take a plain parameter",
        lambda m: any(getattr(p, "is_distributed_weight", False) for p in m.parameters(recurse=False)),
    ),
    (
        "with checkpoint=True, which recomputes as well: leave it out",
        lambda m: bool(getattr(m, "checkpoint", False)),
    ),
    (
        "with gradients of weights that are added up or computed elsewhere: leave fuse_wgrad_accumulation and "
        "delay_wgrad_compute out",
        lambda m: bool(getattr(m, "fuse_wgrad_accumulation", False)) or _delays_weight_gradients(m),
    ),
)


def _kind_of(m: nn.Module) -> str:
    """Return the name of the class of TransformerEngine's modules from which one is derived; empty if of others."""
    kinds = (c for c in type(m).__mro__ if c.__module__.partition(".")[0] == PACKAGE)
    kind = next(kinds, None)
    return kind.__name__ if kind is not None and kind.__module__.startswith(f"{PACKAGE}.pytorch.module.") else ""


def _is_known(m: nn.Module) -> bool:
    return _kind_of(m) in (*CLASSES, *NORMS)


def _why_not_module(m: nn.Module) -> str:
    """Return what is not supported of a module of TransformerEngine, and what to do; empty if all of it is."""
    if not _is_known(m):
        return f"(known are {_KNOWN}): {_TAKE_OTHERS}"
    if is_norm(m):
        return ""
    return next((what for what, has in _UNSUPPORTED if has(m)), "")
