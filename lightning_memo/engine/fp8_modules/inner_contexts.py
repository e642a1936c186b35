"""Contexts of TransformerEngine that a layer must not enter by itself: its autocast, and its recomputation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_memo.engine.fp8_modules.global_state import fp8_manager
from lightning_memo.utils.user_errors import RefusedAtAnyLength

_INNER_AUTOCAST = (
    "a layer enters TransformerEngine's FP8 autocast itself, whose end updates the scales, but lightning_memo runs "
    "layers more than once: enter it around the model instead, in training_step"
)


def entrances(refuse_checkpoint: Callable[..., NoReturn]) -> list[tuple[Any, str, Any]]:
    """Return what each use of TransformerEngine's contexts calls: the owner, its attribute, and what is to replace it.

    Args:
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
    return found


def _enter(
    enter: Callable[..., Any], enabled: bool = False, calibrating: bool = False, *args: Any, **kwargs: Any
) -> Any:
    if enabled or calibrating:
        raise RefusedAtAnyLength(_INNER_AUTOCAST)
    return enter(enabled, calibrating, *args, **kwargs)
