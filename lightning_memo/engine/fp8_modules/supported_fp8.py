"""Which layers with TransformerEngine's modules are trained in FP8. All others are refused with one line."""

from __future__ import annotations

import sys
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

RECIPES: Final = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling")
CLASSES: Final = ("Linear", "LayerNormLinear", "LayerNormMLP")
NORMS: Final = ("LayerNorm", "RMSNorm")  # without quantizers, and with tokens apart
_KNOWN: Final = f"{', '.join((*CLASSES, NORMS[0]))} and {NORMS[1]}"
_TAKE_OTHERS: Final = (
    "take PyTorch's instead, which Lightning's TransformerEnginePrecision keeps with replace_layers=False"
)
_TURN_ON: Final = (
    "set MemoStrategy(transformer_engine_fp8=True), which has not run on a GPU, leave its autocast out, or take "
    "torchao's float8 training"
)


def refuse_unsupported_fp8(layer: nn.Module, allowed: bool) -> None:
    """Refuse a layer whose modules of TransformerEngine compute in FP8, unless that was asked for and is known to run.

    Args:
        layer: The layer, which is about to run.
        allowed: Whether the user has asked for it (`transformer_engine_fp8`).

    Raises:
        ValueError: It was not asked for, or the release, the recipe or a module is not supported.
    """
    modules = engine_modules(layer) if is_in_fp8() else []
    if not modules:
        return
    name = class_name(layer)
    if not allowed:
        if unknown := next((m for m in modules if not _is_known(m)), None):
            raise ValueError(
                f"{class_name(unknown)} of {name} is TransformerEngine's and runs in its FP8 autocast, in which only "
                f"{_KNOWN} are supported: {_TAKE_OTHERS}"
            )
        if scaled := next((m for m in modules if not is_norm(m)), None):
            raise ValueError(
                f"{class_name(scaled)} of {name} is TransformerEngine's and computes in FP8, which changes its scales "
                f"in each forward, but lightning_memo runs layers more than once: {_TURN_ON}"
            )
        raise ValueError(
            f"{class_name(modules[0])} of {name} is TransformerEngine's and runs in its FP8 autocast, whose state "
            f"changes in each forward, but lightning_memo runs layers more than once: {_TURN_ON}"
        )
    if why := why_other_version():
        raise ValueError(f"transformer_engine_fp8=True reads TransformerEngine's state, but {why}: install a known one")
    if why := _why_not_recipe():
        raise ValueError(f"transformer_engine_fp8=True does not support {why}")
    for m in modules:
        if why := _why_not_module(m):
            raise ValueError(f"transformer_engine_fp8=True does not support {class_name(m)} of {name} {why}")


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
    manager = fp8_manager()
    return f"{manager.get_fp8_recipe()}" if manager is not None and is_in_fp8() else ""


def _why_not_recipe() -> str:
    """Return what is not supported of the active autocast, and what to do; empty if all of it is."""
    manager = fp8_manager()
    assert manager is not None
    recipe = manager.get_fp8_recipe()
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
    (
        "with weights in FP8: leave quantized_model_init (fp8_model_init) out",
        lambda m: bool(m.primary_weights_in_fp8),
    ),
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
        return f"in FP8, only {_KNOWN}: {_TAKE_OTHERS}"
    if is_norm(m):
        return ""
    return next((what for what, has in _UNSUPPORTED if has(m)), "")
