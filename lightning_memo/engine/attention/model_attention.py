"""Attention calls that no kernel computes: the model's own attention function runs as ordinary operations."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_memo.engine.attention.mask_patterns import MaskPattern
from lightning_memo.engine.forward.intercept import leave_to_model
from lightning_memo.utils.class_names import class_name

# Arguments of attention functions that change the result and that no kernel computes.
_NOT_COMPUTED = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_mask")
# Arguments that kernels compute without dropout.
_WITHOUT_DROPOUT = ("softcap", "s_aux")


def not_computed(mask: Tensor | MaskPattern | None, dropout: float, arguments: dict[str, Any]) -> str:
    """Return what kernels do not compute among the arguments of an attention call; empty if they compute all."""
    if isinstance(mask, Tensor) and mask.requires_grad:
        return "a mask that requires grad"
    for name in _NOT_COMPUTED:
        if arguments.get(name) is not None:
            return name
    given = [name for name in _WITHOUT_DROPOUT if arguments.get(name) is not None]
    return f"{given[0]} and dropout" if given and dropout else ""


def computed_by_transformers(model: nn.Module, implementation: str) -> bool:
    """Return whether a Hugging Face model computes attention with functions of transformers, whose formulas are known.

    Functions of a user, registered with `AttentionInterface` or put in the place of one of transformers, may compute
    anything. Code that comes with a checkpoint often has a copy of a function of transformers.

    Args:
        model: The model.
        implementation: The name of its attention implementation.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation == "eager":
        functions = [f for kind in {type(module) for module in model.modules()} for f in _named_functions(kind)]
    else:
        functions = [ALL_ATTENTION_FUNCTIONS[implementation]] if implementation in ALL_ATTENTION_FUNCTIONS else []
    return all(map(_of_transformers, functions))


def _named_functions(kind: type[nn.Module]) -> list[Callable[..., Any]]:
    """Return the functions for attention that the forward of a class of modules names."""
    forward: Any = inspect.unwrap(kind.forward)
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    found = [names.get(name) for name in (() if code is None else code.co_names) if "att" in name.lower()]
    return [each for each in found if callable(each) and not isinstance(each, type)]


def _of_transformers(function: Callable[..., Any]) -> bool:
    from transformers.models.llama.modeling_llama import eager_attention_forward as known

    while isinstance(function, functools.partial):
        function = function.func
    return _is_defined_there(function) or (_is_defined_there(known) and _same_code(function, known))


def _is_defined_there(function: Callable[..., Any]) -> bool:
    name: str = getattr(function, "__globals__", {}).get("__name__", "")  # a decorator may copy `__module__`
    return name.startswith(("transformers.", "lightning_memo."))


def _same_code(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    a, b = (getattr(function, "__code__", None) for function in (a, b))
    return all(getattr(a, part, None) == getattr(b, part) for part in ("co_code", "co_consts", "co_names"))


def attend_as_model(
    eager: bool, module: nn.Module, *tensors: Tensor | MaskPattern | None, why: str = "", **arguments: Any
) -> Any:
    """Call the attention function with which the model computes in plain training.

    Args:
        eager: Whether that is the function of the model's module, or transformers' function for SDPA.
        module: The attention module.
        tensors: Queries, keys, values and the mask.
        why: Why no kernel computes the call; empty if it is no call of a layer of the engine.
        arguments: Further arguments of the call.

    Raises:
        ValueError: The model has no such function; or slices or other processes hold some of the tokens.
    """
    if why:
        leave_to_model(f"{class_name(module)} calls attention with {why}, which no attention kernel computes")
    *qkv, mask = tensors
    mask = mask.tensor() if isinstance(mask, MaskPattern) else mask
    return _function(eager, module)(module, *qkv, mask, **arguments)


def _function(eager: bool, module: nn.Module) -> Callable[..., Any]:
    if not eager:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward
    for kind in type(module).__mro__:
        found: Callable[..., Any] | None = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise ValueError(
        f"{class_name(module)} calls attention with arguments that no attention kernel computes, and its module has "
        "no eager_attention_forward: train this model without lightning_memo"
    )
