"""Layers that differ: some have experts and others do not, or some have a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from lightning_memo.shapes.config_sizes import config_size, is_size
from lightning_memo.shapes.expert_layer import ExpertLayer
from lightning_memo.shapes.model_shape import ModelShape

_WINDOW, _FULL = "sliding_attention", "full_attention"
_KNOWN: Final = {_WINDOW, _FULL}


def with_parts(shape: ModelShape, config: Mapping[str, Any], dense_first: int, alternates: bool) -> ModelShape:
    """Return the shape with its parts, if its layers differ.

    Args:
        shape: Shape whose layers all have experts, if any, and a window, if any.
        config: Content of `config.json`.
        dense_first: Number of layers without experts before the others, if the configuration does not specify it.
        alternates: Whether every second layer has no window, if the configuration does not specify it.

    Raises:
        ValueError: A layer has a type that is not known, or a list of layers is not one. The message is one line.
    """
    windows = [None if kind == _FULL else shape.window for kind in _types(config, shape, alternates)]
    dense = _without_experts(config, shape, dense_first)
    dense_ffn = config_size(config, "ffn") if dense else 0
    parts = []
    for (window, is_dense), members in groupby(range(shape.layers), lambda n: (windows[n], n in dense)):
        part = replace(shape, layers=len(list(members)), window=window)
        if is_dense:
            part = replace(part, experts=1, active_experts=1, expert_layer=ExpertLayer(), ffn=dense_ffn)
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return replace(shape, window=None if None in windows else shape.window, parts=tuple(parts))


def _types(config: Mapping[str, Any], shape: ModelShape, alternates: bool) -> Sequence[str]:
    """Type of each layer."""
    given = config.get("layer_types") or ()
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"layer_types is {str(given)[:40]!r}, but must be a list with the type of each layer")
    types = [str(each) for each in given]
    if not types:
        return [_FULL if alternates and number % 2 else _WINDOW for number in range(shape.layers)]
    if len(types) != shape.layers:
        raise ValueError(f"layer_types has {len(types)} entries, but must have one for each of {shape.layers} layers")
    if unknown := sorted(set(types) - _KNOWN):
        raise ValueError(
            f"layers of type {', '.join(unknown)[:80]} are not estimated; layer_types may have {_WINDOW} and {_FULL}"
        )
    return types


def _without_experts(config: Mapping[str, Any], shape: ModelShape, dense_first: int) -> set[int]:
    """Numbers of the layers without experts in a mixture."""
    if shape.experts == 1:
        return set()
    first = _count(config, "first_k_dense_replace", dense_first)
    step = _count(config, "decoder_sparse_step", 1) or 1
    only = config.get("mlp_only_layers") or ()
    if not isinstance(only, (list, tuple)):
        raise ValueError(f"mlp_only_layers is {str(only)[:40]!r}, but must be a list of the layers without experts")
    return {n for n in range(shape.layers) if n < first or n in only or (n + 1) % step}


def _count(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if value != 0 and not is_size(value):
        raise ValueError(f"{name} is {str(value)[:40]!r}, but must be an integer of at least 0")
    return int(value)
