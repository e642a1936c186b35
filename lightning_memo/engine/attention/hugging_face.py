"""Routes the attention of Hugging Face models to the engine, without changes to their code.

Calls that no kernel computes run the model's own attention function, as ordinary operations.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memo.engine.attention.mask_patterns import (
    AllTokensNeeded,
    MaskFunction,
    MaskPattern,
    WholeMask,
    measure_pattern,
    read_rules,
    sharded_mask,
)
from lightning_memo.engine.attention.sliced_attention import attend
from lightning_memo.engine.forward.autocast import autocast_inputs
from lightning_memo.engine.forward.collected_outputs import is_collected
from lightning_memo.engine.forward.intercept import current_handler, is_sdpa_pytorchs, leave_to_model
from lightning_memo.kernels import AttentionSpec, select_backend
from lightning_memo.parallel.batches.token_layout import (
    CurrentLayout,
    TokenLayout,
    ask_classes_of_transformers,
    asks_attention_name,
    valid_ranges,
)
from lightning_memo.utils.around_forward import has_user_hooks
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face

# The name must not contain "flash": transformers would look for kernels on the hub.
ATTENTION_NAME = "lightning_memo"
# Implementations of transformers for which a missing mask means full attention, and that get a mask in all other cases.
_ALWAYS_MASKED = ("eager", "flex_attention")
# Implementations of transformers that take documents from masks, and ignore the lengths that flash attention takes.
_BY_MASKS = ("sdpa", *_ALWAYS_MASKED)
# Arguments of attention functions that change the result and that no kernel computes.
_NOT_COMPUTED = ("position_bias", "block_mask")
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
# Arguments that kernels compute without dropout.
_WITHOUT_DROPOUT = ("softcap", "s_aux")


def attach_attention(model: nn.Module, current: CurrentLayout) -> list[Callable[[], None]]:
    """Make every Hugging Face model inside `model` call the engine's attention.

    A model that computes attention with a function of the user's keeps it: kernels do not know what it computes.

    transformers registers attention functions for the complete process. The registered function therefore belongs to no
    engine and no model: it finds the running slice through `current_handler`, and the layout of the batch in `current`.

    Args:
        model: The module that contains the models.
        current: Holds the layout of the batches that `model` is given.

    Returns:
        Functions that undo the change.
    """
    undo: list[Callable[[], None]] = []
    for host in find_hugging_face(model):
        models: dict[int, Any] = {}  # by configuration, which modules share
        for module in host.modules():  # outer ones first: setting an implementation sets those of submodels, too
            if hasattr(module, "set_attn_implementation"):
                models.setdefault(id(module.config), module)
        ask_classes_of_transformers(models.values())
        before = [module.config._attn_implementation for module in models.values()]
        undo.append(functools.partial(_restore_attention, list(models.values()), before))
        for module, name in zip(models.values(), before, strict=True):
            known = _computed_by_transformers(module, name) and not asks_attention_name(module)
            module.set_attn_implementation(_register(current.seen_by(module), name) if known else name)
    return undo


@dataclass(frozen=True, slots=True)
class _Host:
    """State of the functions that are registered with transformers.

    Attributes:
        current: Holds the layout of the batches.
        always_masked: Whether the model's own attention ignores `is_causal`, so that causal attention needs a mask.
        not_computed: Arguments of attention functions that change the result and that no kernel computes.
    """

    current: CurrentLayout
    always_masked: bool
    not_computed: tuple[str, ...] = _NOT_COMPUTED


def _restore_attention(models: Sequence[Any], names: Sequence[str]) -> None:
    for model, name in zip(models, names, strict=True):
        # Not by `set_attn_implementation`, which refuses a model if a part of it has another implementation only.
        model.config._attn_implementation = name


def _register(current: CurrentLayout, implementation: str) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface

    by_masks = implementation in _BY_MASKS
    host = _Host(current, implementation in _ALWAYS_MASKED, _NOT_COMPUTED + (() if by_masks else _LENGTHS))
    uncapped = implementation == "sdpa" and _sdpa_ignores_caps()
    kind = "masked_" * host.always_masked + "uncapped_" * uncapped + "lengths_" * (not by_masks)
    name = f"{ATTENTION_NAME}_{kind}{id(current):x}"  # `current` is held from now on, so its id stays its own
    AttentionInterface.register(name, functools.partial(_uncapped_attention if uncapped else _attention, host))
    AttentionMaskInterface.register(name, functools.partial(_mask, host))
    return name


def _sdpa_ignores_caps() -> bool:
    """Return whether this version of transformers trains models with soft caps by SDPA, without the caps."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return "softcap" not in sdpa_attention_forward.__code__.co_consts


def _computed_by_transformers(model: nn.Module, implementation: str) -> bool:
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
    if implementation == "sdpa" and not is_sdpa_pytorchs():
        return False
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


def _uncapped_attention(host: _Host, *args: Any, softcap: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    return _attention(host, *args, **kwargs)


def _attention(
    host: _Host,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskPattern | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function with transformers' signature.

    Args:
        query, key, value: `[batch, heads, tokens, head_dim]`.

    Returns:
        The output, `[batch, tokens, heads, head_dim]`, and `None` for the attention weights.
    """
    handler = current_handler()
    _check_call(module, query, key, attention_mask, kwargs)
    layout = host.current.layout
    if layout is not None and (attention_mask is not None or handler is None or host.current.of_layers is None):
        _check_among_processes(layout, module, handler, attention_mask, sliding_window)
    why = _not_computed(host, attention_mask, dropout, kwargs)
    if not why and host.always_masked and (handler or torch.is_grad_enabled()) and _hides_all_keys(attention_mask):
        why = "a mask that hides all keys from some tokens"
    if why or (handler is None and (not isinstance(attention_mask, MaskPattern) or has_user_hooks())):
        if why:
            leave_to_model(f"{class_name(module)} calls attention with {why}, which no attention kernel computes")
        mask = attention_mask.tensor() if isinstance(attention_mask, MaskPattern) else attention_mask
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "sliding_window": sliding_window}
        return _own_function(host, module)(module, query, key, value, mask, **kwargs)[0], None
    if host.always_masked:
        is_causal, attention_mask = False, _added(attention_mask, query.dtype)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] < key.shape[2]:  # as transformers does it
        causal, stop = query.shape[2] > 1, query.shape[2] if query.shape[2] > 1 else key.shape[2]
        key, value = key[:, :, :stop], value[:, :, :stop]
    spec = _spec(attention_mask, bool(causal), dropout, scaling, kwargs)
    if handler is not None:
        out = handler(query, key, value, spec)
    else:
        query, key, value = autocast_inputs(query, key, value)
        out = attend(select_backend(query, key, value, spec), query, key, value, spec)
    return out.transpose(1, 2).contiguous(), None


def _spec(
    mask: Tensor | MaskPattern | None, causal: bool, dropout: float, scale: float | None, arguments: dict[str, Any]
) -> AttentionSpec:
    if isinstance(mask, WholeMask):
        spec = AttentionSpec(False, scale, None, dropout, whole_mask=mask.mask)
    elif isinstance(mask, MaskPattern):
        causal = causal if mask.causal is None else mask.causal
        spec = AttentionSpec(causal, scale, mask.window, dropout, mask.lengths, documents=mask.documents)
    else:
        spec = AttentionSpec(causal and mask is None, scale, None, dropout, mask=mask)
    return replace(spec, softcap=arguments.get("softcap"), sinks=arguments.get("s_aux"))


def _added(mask: Tensor | MaskPattern | None, dtype: torch.dtype) -> Tensor | MaskPattern | None:
    """Return a mask as eager attention adds it: kernels would hide keys where a boolean mask is false."""
    return mask.to(dtype) if isinstance(mask, Tensor) and not mask.is_floating_point() else mask


def _hides_all_keys(mask: Tensor | MaskPattern | None) -> bool:
    """Return whether an additive mask hides all keys from a query.

    Eager attention then gives all keys the same weight, which kernels with a log-sum-exp cannot compute.
    """
    if not isinstance(mask, Tensor) or not mask.is_floating_point() or isinstance(mask, FakeTensor):
        return False
    return bool((mask.amax(-1) <= torch.finfo(mask.dtype).min).any())


def _check_among_processes(
    layout: TokenLayout, module: nn.Module, handler: object, mask: object, window: int | None
) -> None:
    """Check an attention call while the tokens of a sequence are divided over processes.

    Raises:
        ValueError: The call would see only this process's tokens, or its mask is not supported.
    """
    name = class_name(module)
    if handler is None:
        raise AllTokensNeeded(
            f"{name} attends outside of the repeated layers, where only some of the tokens are available: train this "
            f"model with {layout.how_to_compute_all}"
        )
    # A module may leave its window to the mask (Qwen2-MoE).
    if isinstance(mask, WholeMask):
        return
    if not isinstance(mask, MaskPattern) or window not in (None, mask.window):
        raise AllTokensNeeded(
            f"{name} has an attention mask that is neither causal, nor a sliding window, nor full: train this model "
            f"with {layout.how_to_compute_all}"
        )


def _check_call(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | MaskPattern | None, arguments: dict[str, Any]
) -> None:
    """Refuse calls whose weights are asked for, and layers that add keys and would extend a mask that is a tensor.

    Raises:
        ValueError: Attention weights are to be returned, or a pattern does not describe all keys.
    """
    queries, keys = query.shape[2], key.shape[2]
    if is_collected("attentions") or arguments.get("output_attentions"):
        raise ValueError(
            f"{class_name(module)} is asked for its attention weights (output_attentions=True), which lightning_memo's "
            "attention kernels do not return: set output_attentions=False"
        )
    if isinstance(mask, MaskPattern) and queries != keys:
        raise ValueError(
            f"{class_name(module)} attends to {keys} keys with an attention mask for {queries} tokens, which it "
            "extends only if it is a tensor: train this model without lightning_memo"
        )


def _not_computed(host: _Host, mask: Tensor | MaskPattern | None, dropout: float, arguments: dict[str, Any]) -> str:
    """Return the argument of an attention call that kernels do not compute; empty if they compute all."""
    if isinstance(mask, Tensor) and mask.requires_grad:
        return "a mask that requires grad"
    for name in host.not_computed:
        if arguments.get(name) is not None:
            return name
    given = [name for name in _WITHOUT_DROPOUT if arguments.get(name) is not None]
    return f"{given[0]} and dropout" if given and dropout else ""


def _own_function(host: _Host, module: nn.Module) -> Callable[..., Any]:
    """Return the attention function with which a model computes in plain training.

    Raises:
        ValueError: The model has no such function.
    """
    if not host.always_masked:
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


def _mask(
    host: _Host,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | MaskPattern | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | MaskPattern | None:
    """Mask function with transformers' signature. A pattern that was made before is returned, as masks in 4D are.

    Returns:
        A pattern; transformers' own mask if there is no pattern; `None` where transformers makes no mask either.

    Raises:
        ValueError: Tokens are divided over processes or over slices of the model, and no pattern describes the mask.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    if isinstance(attention_mask, MaskPattern):
        return attention_mask
    assert mask_function is not None
    local_size = kwargs.get("local_size")
    may_skip = kwargs.get("allow_is_bidirectional_skip", False)
    may_skip |= kwargs.get("allow_is_causal_skip", True) and not host.always_masked
    explicit = functools.partial(
        eager_mask if host.always_masked and host.current.layout is None else sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **kwargs,
    )
    if host.current.layout is not None:
        whole = functools.partial(explicit, allow_is_causal_skip=False)
        added = kwargs.get("dtype", torch.float32) if host.always_masked else None
        may_skip = may_skip and local_size is None
        return sharded_mask(mask_function, host.current, batch_size, q_length, device, may_skip, whole, added)
    # Tokens in a cache and cross-attention; only without them do queries and keys have the same positions.
    other_shape = attention_mask is not None and attention_mask.shape != (batch_size, kv_length)
    if other_shape or q_length != kv_length or not isinstance(q_offset, int) or q_offset or kv_offset:
        return explicit()
    valid = [] if attention_mask is None else valid_ranges(attention_mask)
    if valid == [] and may_skip and (local_size is None or kv_length < local_size):
        return None
    pattern = None if valid is None else _pattern(mask_function, batch_size, kv_length, device, **kwargs)
    if pattern is not None and valid:
        # Eager attention attends to all keys where padding on the left hides all of them.
        pattern = pattern.padded(valid, kv_length, may_see_nothing=not host.always_masked)
    if pattern is None:
        return explicit()
    if attention_mask is not None:  # a recomputation may build the mask again; see Note: [Values that are read later]
        explicit = functools.partial(explicit, attention_mask=attention_mask.clone())
    return replace(pattern, explicit=functools.partial(explicit, allow_is_causal_skip=False))


def _pattern(
    mask_function: MaskFunction,
    batch: int,
    tokens: int,
    device: torch.device | str,
    use_vmap: bool = False,
    **_: Any,
) -> MaskPattern | None:
    """Return the pattern of a mask function for `batch` rows of `tokens` tokens; `None` if there is none."""
    from transformers.masking_utils import sdpa_mask

    rules = read_rules(mask_function, torch.arange(tokens, device=device)[None])
    if rules is not None:
        return rules.pattern(batch, tokens)

    def seen_by(first: int, queries: int) -> Tensor:
        mask: Tensor = sdpa_mask(
            batch_size=batch,
            q_length=queries,
            kv_length=tokens,
            q_offset=first,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return mask

    return measure_pattern(seen_by, tokens)
