"""Refuses activation checkpointing in and around layers, which contradicts the engine's own recomputation.

A checkpointed function runs again in the backward, outside of its slice: attention would see the keys of that slice
only, dropout would draw for that slice only, and gradients would be wrong without any error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook

from lightning_memo.engine.fp8_modules import entrances
from lightning_memo.utils.around_forward import is_checkpointed, is_in_backward
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.replaced_functions import replaced
from lightning_memo.utils.user_errors import RefusedAtAnyLength

TURN_IT_OFF = "turn it off: lightning_memo recomputes by itself; alpha=0 is full recomputation"
# Every use of `torch.utils.checkpoint` calls one of these, reentrant or not, and however it was imported.
_ENTRANCES: tuple[tuple[Any, str], ...] = ((CheckpointFunction, "forward"), (_checkpoint_hook, "__init__"))


@contextlib.contextmanager
def refusing_checkpoint(layer: nn.Module) -> Iterator[None]:
    """Make activation checkpointing by this thread raise inside the context, in which a layer runs that is trained.

    Args:
        layer: The layer.

    Raises:
        ValueError: `torch.utils.checkpoint` or TransformerEngine's checkpoint was called, or its FP8 autocast entered.
    """
    refused = [(kind, name, _refuse) for kind, name in _ENTRANCES] + entrances(layer, _refuse_of_engine)
    with contextlib.ExitStack() as stack:
        for kind, name, replacement in refused:
            stack.enter_context(replaced(kind, name, replacement))
        yield


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RefusedAtAnyLength(f"a layer uses activation checkpointing (torch.utils.checkpoint): {TURN_IT_OFF}")


def _refuse_of_engine(*args: Any, **kwargs: Any) -> NoReturn:
    raise RefusedAtAnyLength(f"a layer uses TransformerEngine's activation checkpointing: {TURN_IT_OFF}")


def refuse_checkpoint_around(layer: nn.Module) -> None:
    """Refuse the call of a layer that is trained if something around the layer recomputes it.

    Args:
        layer: The layer.

    Raises:
        ValueError: The layer is inside of `torch.utils.checkpoint`, or runs during a backward.
    """
    if is_in_backward() and torch.is_grad_enabled():
        raise ValueError(
            f"{class_name(layer)} runs again in the backward, by activation checkpointing around it: {TURN_IT_OFF}"
        )
    if is_checkpointed():
        raise ValueError(f"{class_name(layer)} runs inside of torch.utils.checkpoint: {TURN_IT_OFF}")


def refuse_without_grad(what: str) -> None:
    """Refuse a part of a trained layer that runs without gradients, because it would run again in the backward.

    Args:
        what: Name of the part that runs now.

    Raises:
        ValueError: Gradients are disabled.
    """
    if not torch.is_grad_enabled():
        raise RefusedAtAnyLength(
            f"{what} runs without gradients in a layer that is trained, for example by activation checkpointing of "
            f"another library: {TURN_IT_OFF}"
        )


def refuse_inner_backward(layer: str) -> NoReturn:
    """Refuse a backward within a layer's forward: it needs tensors that leave the device or are dropped.

    Args:
        layer: Name of the layer's class.

    Raises:
        ValueError: Always.
    """
    raise RefusedAtAnyLength(
        f"{layer} runs a backward within its forward, whose activations are swapped or recomputed at every alpha: put "
        "that part of the forward inside torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)"
    )


@contextlib.contextmanager
def refusing_transforms(layer: str) -> Iterator[None]:
    """Say what is wrong if a layer differentiates a function by a transform, which PyTorch refuses within hooks.

    Args:
        layer: Name of the layer's class.

    Raises:
        ValueError: The layer calls `torch.func.grad`, for example.
    """
    try:
        yield
    except RuntimeError as error:
        if "don't yet support saved tensor hooks" not in str(error):
            raise
        raise ValueError(
            f"{layer} calls torch.func.grad, vjp, jacrev or hessian in its forward, whose activations can be neither "
            "swapped nor recomputed: write out this derivative, or train this model without lightning_memo"
        ) from error
