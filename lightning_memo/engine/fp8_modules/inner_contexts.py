"""What a layer must not do with TransformerEngine: enter its autocast or its recomputation, call modules of others."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

from torch import nn

from lightning_memo.engine.fp8_modules.global_state import PACKAGE, fp8_manager, is_in_fp8
from lightning_memo.engine.fp8_modules.supported_fp8 import UNSUPPORTED
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.user_errors import RefusedAtAnyLength

_INNER_AUTOCAST = (
    "a layer enters TransformerEngine's FP8 autocast itself, whose end may update the scales, but lightning_memo runs "
    "layers more than once: enter it around the model instead, in training_step"
)
_FORWARD_ARGUMENTS: Final = ("inp", "is_first_microbatch", "fp8_output", "fp8_grad")


def entrances(layer: nn.Module, refuse_checkpoint: Callable[..., NoReturn]) -> list[tuple[Any, str, Any]]:
    """Return what each use of TransformerEngine's contexts calls: the owner, its attribute, and what is to replace it.

    Args:
        layer: The layer that runs while they are replaced.
        refuse_checkpoint: Raises the error for activation checkpointing.
    """
    found: list[tuple[Any, str, Any]] = []
    recomputation = getattr(
        sys.modules.get("transformer_engine.pytorch.distributed"), "activation_recompute_forward", None
    )
    if recomputation is not None:
        found.append((recomputation, "__enter__", staticmethod(refuse_checkpoint)))
    manager = fp8_manager()
    for name in ("autocast_enter", "fp8_autocast_enter"):  # the second one before 2.9
        if manager is not None and name in vars(manager):
            found.append((manager, name, staticmethod(functools.partial(_enter, getattr(manager, name)))))
    base = getattr(sys.modules.get(f"{PACKAGE}.pytorch.module.base"), "TransformerEngineBaseModule", None)
    if base is not None and "prepare_forward" in vars(base):
        found.append((base, "prepare_forward", _method(_prepare, base.prepare_forward, layer)))
    fuser = getattr(sys.modules.get(f"{PACKAGE}.pytorch.ops.fuser"), "OperationFuser", None)
    if fuser is not None:  # operations, among them norms, do not prepare their forward
        found.append((fuser, "__call__", _method(_fuse, vars(fuser)["__call__"], layer)))
    for name, kind in (("linear", "Linear"), ("layernorm_linear", "LayerNormLinear")):
        owner = getattr(sys.modules.get(f"{PACKAGE}.pytorch.module.{name}"), kind, None)
        if owner is not None:
            found.append((owner, "forward", _method(_forward, owner.forward)))
    return found


def _method(function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    return lambda module, *args, **kwargs: function(*given, module, *args, **kwargs)


def _prepare(prepare: Callable[..., Any], layer: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if is_in_fp8() and all(m is not module for m in layer.modules()):
        raise RefusedAtAnyLength(
            f"{class_name(layer)} calls {class_name(module)}, which is TransformerEngine's and computes in FP8, but is "
            "none of its modules, so that its scales are not restored: assign it to an attribute of the layer, or "
            "leave the autocast out"
        )
    return prepare(module, *args, **kwargs)


def _fuse(call: Callable[..., Any], layer: nn.Module, fuser: Any, *args: Any, **kwargs: Any) -> Any:
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
