"""The key-value caches of Hugging Face models, which layers that are swapped or recomputed neither read nor fill."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from torch import Tensor, nn

from lightning_memo.utils.class_names import class_name

_MARK = "_memo_calls"  # an attribute of caches: the inputs of layers that have not filled them, by call


def without_caches(
    layer: nn.Module, x: Tensor, rest: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a layer with `None` in place of key-value caches.

    Args:
        layer: The layer.
        x: Its input.
        rest: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: A cache holds tokens, or would hold them if an earlier forward had filled it.
    """
    caches = [value for value in (*rest, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return rest, kwargs
    numbers = tuple(value for value in (*rest, *kwargs.values()) if type(value) is int)  # rounds of looped models
    if _is_filled(caches[0], layer) or _was_given(caches[0], (id(layer), *numbers), x):
        raise ValueError(
            f"{class_name(layer)} gets a key-value cache of an earlier forward, as in prefix tuning, but layers that "
            "are swapped or recomputed neither fill nor read caches: pass all tokens in one forward, use another "
            "method, for example LoRA, or train this model without lightning_memo"
        )
    rest = [None if _is_cache(value) else value for value in rest]
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return rest, kwargs


def _is_cache(value: object) -> bool:
    """Return whether an argument is a key-value cache of transformers."""
    return hasattr(type(value), "get_seq_length") and hasattr(type(value), "update")


def _is_filled(cache: Any, layer: nn.Module) -> bool:
    """Return whether a cache holds something for a layer. Frozen layers before it may fill theirs."""
    index = next((m.layer_idx for m in layer.modules() if isinstance(getattr(m, "layer_idx", None), int)), None)
    for holds in ("get_seq_length", "has_previous_state") if index is not None else ():
        # Layers of a cache have keys and values, a recurrent state, or both, and raise if asked for what they lack.
        with contextlib.suppress(ValueError, AttributeError):
            if getattr(cache, holds)(index):
                return True
    return False


def _was_given(cache: Any, call: tuple[int, ...], x: Tensor) -> bool:
    """Return whether a call with another input got this cache before, and mark it. Copies of a cache have its marks."""
    inputs: dict[tuple[int, ...], weakref.ref[Tensor]] = vars(cache).setdefault(_MARK, {})
    before = inputs.setdefault(call, weakref.ref(x))
    return before() is not x
