"""Rotary tables whose frequencies depend on the length of a sequence, where a forward of the model sees a part of it.

transformers chooses the frequencies of "dynamic" and "longrope" in each forward of the rotary module, by the largest
position that comes, and keeps those of "dynamic" for later forwards. So a part of the tokens comes with the largest
position of all: the module then chooses, and keeps, what it would for the whole batch.
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

_DEPENDING = ("dynamic", "longrope")


def is_rotary(module: nn.Module) -> bool:
    """Whether a module makes rotary tables, as those of transformers do."""
    return any(kind.__name__.endswith("RotaryEmbedding") for kind in type(module).__mro__)


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module makes rotary tables that are others in a longer sequence."""
    kinds = getattr(module, "rope_type", "default")
    return is_rotary(module) and any(k in _DEPENDING for k in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def attach_rotary(model: nn.Module, layers: Sequence[nn.Module], current: CurrentLayout) -> list[Callable[[], None]]:
    """Make rotary tables of a part of the tokens those of the whole batch; returns what undoes it.

    Raises:
        ValueError: Layers make such tables themselves, from positions of one slice.
    """
    for layer in layers:
        for module in layer.modules():
            if depends_on_length(module):
                raise ValueError(
                    f"{type(module).__name__} makes rotary tables by the length of the sequence (dynamic or longrope) "
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
    """Stands in for a rotary forward: tables `[..., tokens, features]` of positions `[..., tokens]`."""
    layout = current.layout
    if layout is None:
        return forward(x, position_ids, *args, **kwargs)
    largest = layout.tokens - 1 if layout.largest_position is None else layout.largest_position
    last = position_ids.new_full((*position_ids.shape[:-1], 1), largest)
    tables = forward(x, torch.cat([position_ids, last], -1), *args, **kwargs)
    return tree_map(lambda t: t[..., :-1, :].contiguous(), tables)
