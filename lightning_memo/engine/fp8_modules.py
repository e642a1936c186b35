"""Modules of TransformerEngine and torchao in layers: which of them are trained in FP8, and which layers cannot be cut.

All others are refused with one line, and so are a layer's own uses of TransformerEngine's contexts.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn

from torch import nn

from lightning_memo.engine.fp8_state import (
    PACKAGE,
    fp8_manager,
    is_in_fp8,
    te_modules,
    why_other_version,
)
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.user_errors import RefusedAtAnyLength

UNSUPPORTED: Final = "in TransformerEngine's FP8, lightning_memo does not support"
RECIPES: Final = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling")
FP8_WEIGHTS: Final = "with weights in FP8: leave quantized_model_init (fp8_model_init) out"
CLASSES: Final = ("Linear", "LayerNormLinear", "LayerNormMLP")
_NORMS: Final = ("LayerNorm", "RMSNorm")  # without quantizers, and with tokens apart
_KNOWN: Final = f"{', '.join((*CLASSES, _NORMS[0]))} and {_NORMS[1]}"
_TAKE_OTHERS: Final = (
    "take PyTorch's instead, which Lightning's TransformerEnginePrecision keeps with replace_layers=False"
)
# Recipes with which no layer has run on a GPU here.
_NOT_RUN: Final = ("MXFP8BlockScaling",)
_INNER_AUTOCAST = (
    "a layer enters TransformerEngine's FP8 autocast itself, whose end may update the scales, but lightning_memo runs "
    "layers more than once: enter it around the model instead, in training_step"
)
_FORWARD_ARGUMENTS: Final = ("inp", "is_first_microbatch", "fp8_output", "fp8_grad")
# Fields of torchao's configuration that describe how a tensor of tokens is cast.
_CASTS_OF_TOKENS: Final = (
    "cast_config_input",
    "cast_config_grad_output",
    "cast_config_input_for_grad_weight",
    "cast_config_grad_output_for_grad_weight",
)


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
        modules = te_modules(layer) if is_in_fp8() else []
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
    found = [m for m in te_modules(module) if not is_norm(m)] if is_in_fp8() else []
    if not found:
        return ""
    what = class_name(found[0]) + ("" if found[0] is module else f" of {class_name(module)}")
    return f"{what} computes in TransformerEngine's FP8, in which tokens may share a scale"


def why_scaled_together(module: nn.Module) -> str:
    """Return why a module of torchao computes all tokens of a layer together; empty if there is none.

    A comparison in half precision would not show it: fp8 rounds as coarsely as a few operations in bf16.
    """
    for name, m in module.named_modules():
        if type(m).__module__.partition(".")[0] == "torchao" and _scales_tensors(getattr(m, "config", None)):
            where = f"{name} of {class_name(module)}" if name else class_name(module)
            return (
                f'{where} has one float8 scale for all tokens (torchao\'s recipe "tensorwise"; with "rowwise" or '
                '"rowwise_with_gw_hp" each token has its own)'
            )
    return ""


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm of TransformerEngine, which computes each token by itself and without FP8."""
    return _kind_of(module) in _NORMS


def fp8_form() -> str:
    """Return by which recipe modules of TransformerEngine compute now; empty if not in FP8."""
    return f"{_recipe()}" if is_in_fp8() else ""


def _recipe() -> Any:
    """Return the recipe of the active autocast."""
    manager = fp8_manager()
    assert manager is not None
    return manager.get_fp8_recipe()


def _why_not_recipe() -> str:
    """Return the property of the active autocast that is not supported, and the remedy; empty if there is none."""
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


def _why_not_module(m: nn.Module) -> str:
    """Return the property of a module of TransformerEngine that is not supported, and the remedy; empty if none."""
    if not _is_known(m):
        return f"(known are {_KNOWN}): {_TAKE_OTHERS}"
    if is_norm(m):
        return ""
    return next((what for what, has in _UNSUPPORTED if has(m)), "")


def _is_known(m: nn.Module) -> bool:
    return _kind_of(m) in (*CLASSES, *_NORMS)


def _kind_of(m: nn.Module) -> str:
    """Return the name of the class of TransformerEngine's modules from which one is derived; empty if of others."""
    kinds = (c for c in type(m).__mro__ if c.__module__.partition(".")[0] == PACKAGE)
    kind = next(kinds, None)
    return kind.__name__ if kind is not None and kind.__module__.startswith(f"{PACKAGE}.pytorch.module.") else ""


def _delays_weight_gradients(m: Any) -> bool:
    store = getattr(m, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


# Properties that each class has and that are not supported.
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


def _scales_tensors(config: Any) -> bool:
    """Whether a configuration of torchao's float8 has one scale for a whole tensor of tokens."""
    casts = [cast for cast in (getattr(config, name, None) for name in _CASTS_OF_TOKENS) if cast is not None]
    return any(cast.scaling_type.name != "DISABLED" and cast.scaling_granularity.name == "TENSORWISE" for cast in casts)


def lock_channels(layer: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Make the note in the norms of TransformerEngine in a layer that their first call would make.

    From release 2.19 on, the first call of an operation fixes where its further tensors come from, of which norms have
    none, and writes that into an attribute. Layers that write attributes are not cut into slices.

    Args:
        layer: The layer, which is about to run.
        layers: All layers. Their norms are noted with those of the first one, so that layers stay alike.
    """
    if f"{PACKAGE}.pytorch.ops" in sys.modules and next(_unlocked(layer), None) is not None:
        for each in (layer, *layers):
            for norm in _unlocked(each):
                norm._lock_extra_tensor_channels()  # type: ignore[operator]


def _unlocked(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the norms that were not called yet; none of releases before 2.19."""
    for m in layer.modules():
        if getattr(m, "_extra_tensor_channels_locked", None) is False and is_norm(m):
            yield m


def keep_quantized_weights(module: nn.Module) -> None:
    """Let modules of TransformerEngine keep their FP8 weights from the forward to the backward, as beside DDP.

    From release 2.16 on, they ask once whether they are in a unit of FSDP2, which PyTorch's `replicate` makes as well.
    If so, the backward quantizes the gathered weights again. With delayed scaling, it takes the scales of the next
    forward, which beside DDP it does not.

    Args:
        module: The module that is trained. None of its weights is sharded.
    """
    for m in te_modules(module):
        if hasattr(type(m), "is_fsdp2"):
            m._is_fsdp2 = False  # type: ignore[assignment]


def entrances(
    layer: nn.Module, refuse_checkpoint: Callable[..., NoReturn]
) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the functions that replace entrances of TransformerEngine's contexts, each with its owner and attribute.

    A layer must not enter its autocast or its recomputation, nor call modules of others.

    Args:
        layer: The layer that runs while they are replaced.
        refuse_checkpoint: Raises the error for activation checkpointing.
    """
    found: list[tuple[Any, str, Callable[..., Any]]] = []
    recomputation = getattr(
        sys.modules.get("transformer_engine.pytorch.distributed"), "activation_recompute_forward", None
    )
    if recomputation is not None:
        found.append((recomputation, "__enter__", refuse_checkpoint))
    manager = fp8_manager()
    for name in ("autocast_enter", "fp8_autocast_enter"):  # the second one before 2.9
        if manager is not None and name in vars(manager):
            found.append((manager, name, _enter))
    base = getattr(sys.modules.get(f"{PACKAGE}.pytorch.module.base"), "TransformerEngineBaseModule", None)
    if base is not None and "prepare_forward" in vars(base):
        found.append((base, "prepare_forward", functools.partial(_prepare, layer)))
    fuser = getattr(sys.modules.get(f"{PACKAGE}.pytorch.ops.fuser"), "OperationFuser", None)
    if fuser is not None:  # operations, among them norms, do not prepare their forward
        found.append((fuser, "__call__", functools.partial(_fuse, layer)))
    for name, kind in (("linear", "Linear"), ("layernorm_linear", "LayerNormLinear")):
        owner = getattr(sys.modules.get(f"{PACKAGE}.pytorch.module.{name}"), kind, None)
        if owner is not None:
            found.append((owner, "forward", _forward))
    return found


def _prepare(layer: nn.Module, prepare: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if is_in_fp8() and all(m is not module for m in layer.modules()):
        raise RefusedAtAnyLength(
            f"{class_name(layer)} calls {class_name(module)}, which is TransformerEngine's and computes in FP8, but is "
            "none of its modules, so that its scales are not restored: assign it to an attribute of the layer, or "
            "leave the autocast out"
        )
    return prepare(module, *args, **kwargs)


def _fuse(layer: nn.Module, call: Callable[..., Any], fuser: Any, *args: Any, **kwargs: Any) -> Any:
    own = set(layer.modules())
    borrowed = next((op for op in fuser._basic_ops if op not in own), None)
    if borrowed is not None and is_in_fp8():
        raise RefusedAtAnyLength(
            f"{class_name(layer)} calls {class_name(borrowed)}, which is TransformerEngine's and runs in its FP8 "
            "autocast, but is none of its modules, so that its state is not restored: assign it to an attribute of the "
            "layer, or take PyTorch's"
        )
    return call(fuser, *args, **kwargs)


def _forward(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(_FORWARD_ARGUMENTS, args, strict=False)) | kwargs
    for name in ("fp8_output", "fp8_grad"):
        if given.get(name) and is_in_fp8():
            raise RefusedAtAnyLength(f"{UNSUPPORTED} {class_name(module)} with {name}=True: leave {name} out")
    return forward(module, *args, **kwargs)


def _enter(
    enter: Callable[..., Any], enabled: bool = False, calibrating: bool = False, *args: Any, **kwargs: Any
) -> Any:
    if enabled or calibrating:
        raise RefusedAtAnyLength(_INNER_AUTOCAST)
    return enter(enabled, calibrating, *args, **kwargs)
