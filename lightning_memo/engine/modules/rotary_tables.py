"""Rotary tables whose frequencies depend on the sequence length, for forwards that see only a part of the batch.

transformers chooses the frequencies of "dynamic" and "longrope" in each forward of the rotary module by the largest
position, and keeps those of "dynamic" for later forwards. Therefore the largest position of the batch is appended to
the positions of some of the tokens or rows: the module then chooses and keeps the frequencies of the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.parallel.batches.current_layout import CurrentLayout
from lightning_memo.utils.class_names import class_name

_DEPENDING = ("dynamic", "longrope")


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module makes rotary tables like those of transformers."""
    return any(kind.__name__.endswith("RotaryEmbedding") for kind in type(module).__mro__)


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module makes other rotary tables for longer sequences."""
    kinds = getattr(module, "rope_type", "default")
    return is_rotary(module) and any(k in _DEPENDING for k in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def attach_rotary(model: nn.Module, layers: Sequence[nn.Module], current: CurrentLayout) -> list[Callable[[], None]]:
    """Make rotary tables of some tokens equal to those of the whole batch.

    Args:
        model: The module that contains the rotary modules.
        layers: The model's layers.
        current: Holds the layout of the batch.

    Returns:
        Functions that undo this.

    Raises:
        ValueError: Layers make such tables themselves, from the positions of one slice.
    """
    for layer in layers:
        for module in layer.modules():
            if depends_on_length(module):
                raise ValueError(
                    f"{class_name(module)} makes rotary tables by the length of the sequence (dynamic or longrope) "
                    "inside a layer, which runs on some of the tokens at a time: use another rope_scaling, like yarn"
                )
    rotate = functools.partial(_rotate_part, current)
    return [replace_forward(module, rotate) for module in model.modules() if depends_on_length(module)]


def _rotate_part(
    current: CurrentLayout,
    module: nn.Module,
    forward: Callable[..., Any],
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces the forward of a rotary module: tables `[..., tokens, features]` of positions `[..., tokens]`."""
    layout = current.layout
    if layout is not None:
        largest = layout.tokens - 1 if layout.largest_position is None else layout.largest_position
    elif current.largest_position is not None:
        largest = current.largest_position()
    else:
        return forward(x, position_ids, *args, **kwargs)
    last = position_ids.new_full((*position_ids.shape[:-1], 1), largest)
    tables = forward(x, torch.cat([position_ids, last], -1), *args, **kwargs)
    return tree_map(lambda t: t[..., :-1, :].contiguous(), tables)
