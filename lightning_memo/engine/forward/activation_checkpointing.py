"""Activation checkpointing in and around layers, which the engine's own recomputation cannot go together with.

What is checkpointed runs again in the backward, outside of its slice: attention would meet the keys of that slice
alone, dropout would draw for it alone, and gradients would be wrong without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook

TURN_IT_OFF = "turn it off: MemoStrategy recomputes by itself; alpha=0 is full recomputation"
# What every use of `torch.utils.checkpoint` comes to, reentrant or not, whoever imported what of it by name.
_ENTRANCES: tuple[tuple[Any, str], ...] = ((CheckpointFunction, "forward"), (_checkpoint_hook, "__init__"))


@contextlib.contextmanager
def refusing_checkpoint() -> Iterator[None]:
    """Inside, `torch.utils.checkpoint` raises: a layer runs that is trained.

    Raises:
        ValueError: It was called.
    """
    before = [(kind, name, vars(kind)[name]) for kind, name in _ENTRANCES]
    for kind, name in _ENTRANCES:
        setattr(kind, name, staticmethod(_refuse))
    try:
        yield
    finally:
        for kind, name, own in before:
            setattr(kind, name, own)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(f"a layer uses activation checkpointing (torch.utils.checkpoint): {TURN_IT_OFF}")


def refuse_layer_in_backward(layer: str) -> None:
    """Layers run in a backward only where something around them recomputes them.

    Args:
        layer: The name of its class.

    Raises:
        ValueError: A backward is under way.
    """
    if torch._C._current_graph_task_id() != -1:
        raise ValueError(f"{layer} runs again in the backward, by activation checkpointing around it: {TURN_IT_OFF}")


def refuse_without_grad(what: str) -> None:
    """Where a layer is trained, something of it runs without gradients only to run again in the backward.

    Args:
        what: What runs now.

    Raises:
        ValueError: It runs without gradients.
    """
    if not torch.is_grad_enabled():
        raise ValueError(
            f"{what} runs without gradients in a layer that is trained, as by activation checkpointing of another "
            f"library: {TURN_IT_OFF}"
        )


def refuse_inner_backward(layer: str) -> NoReturn:
    """A backward within a layer's forward asks for what leaves the device, or is dropped.

    Args:
        layer: The name of its class.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{layer} runs a backward within its forward, whose activations are swapped or recomputed, whatever alpha is: "
        "put that part of the forward inside torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)"
    )
