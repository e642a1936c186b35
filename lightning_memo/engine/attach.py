"""Directs the attention of Hugging Face models to the engine, without touching their code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memo.engine.intercept import autocast_inputs, current_handler
from lightning_memo.kernels import AttentionBackend, AttentionResult, AttentionSpec, select_backend

# Keep "flash" out of the name: transformers would look for kernels on the hub.
ATTENTION_NAME = "lightning_memo"
# Arguments of attention functions that change the result and are not known here.
_UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_mask")
_CHECKED_PAIRS = 4096


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """What a model's mask is, instead of the mask itself: `[tokens, tokens]` is too large to build.

    Attributes:
        causal: Queries see no later key.
        window: Queries see this many positions, their own included; `None` is all.
        lengths: Valid tokens of each batch row, padding on the right; `None` is all.
    """

    causal: bool
    window: int | None
    lengths: tuple[int, ...] | None


def attach_attention(model: nn.Module) -> list[Callable[[], None]]:
    """Make every Hugging Face model inside `model` call the engine's attention; returns what undoes it.

    transformers keeps attention functions for the whole process, so what is registered knows no engine and no model:
    the running slice answers, and it is found through `current_handler`.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    hosts = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    # Submodels share the attention setting of the outermost one.
    outermost = [m for m in hosts if not any(m is not o and m in set(o.modules()) for o in hosts)]
    if not outermost:
        return []
    _register()
    undo: list[Callable[[], None]] = []
    for host in outermost:
        before = host.config._attn_implementation
        undo.append(lambda host=host, before=before: host.set_attn_implementation(before))  # type: ignore[misc]
        host.set_attn_implementation(ATTENTION_NAME)
    return undo


@contextlib.contextmanager
def collecting_nothing() -> Iterator[None]:
    """Inside, transformers adds nothing to the outputs that it collects by hooks (router logits, hidden states)."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    if collector is None:
        yield
        return
    token = collector.set(None)
    try:
        yield
    finally:
        collector.reset(token)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)


def _attention(
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
    """An attention function as transformers calls it: `[batch, heads, tokens, head_dim]` in, heads after tokens out."""
    handler = current_handler()
    if handler is None and (not torch.is_grad_enabled() or not isinstance(attention_mask, MaskPattern)):
        return _sdpa_of_transformers(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    for name in _UNKNOWN_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} calls attention with {name}, which the attention kernels here do not "
                "compute: train this model without MemoStrategy"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    spec = _spec(attention_mask, bool(causal), sliding_window, dropout, scaling)
    if handler is not None:
        out = handler(query, key, value, spec)
    else:
        query, key, value = autocast_inputs(query, key, value)
        out = _WholeAttention.apply(select_backend(query, key, value, spec), spec, query, key, value)
    return out.transpose(1, 2).contiguous(), None


def _spec(
    mask: Tensor | MaskPattern | None, causal: bool, window: int | None, dropout: float, scale: float | None
) -> AttentionSpec:
    if isinstance(mask, MaskPattern):
        return AttentionSpec(mask.causal, scale, mask.window, dropout, mask.lengths)
    if mask is not None:
        return AttentionSpec(False, scale, None, dropout, mask=mask)
    return AttentionSpec(causal, scale, window if causal else None, dropout)


def _sdpa_of_transformers(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    dropout: float,
    scaling: Any,
    causal: Any,
    **kwargs: Any,
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, causal, **kwargs)


class _WholeAttention(torch.autograd.Function):
    """Attention of a module that is not among the engine's layers, or of a layer that runs plainly."""

    @staticmethod
    def forward(ctx: Any, backend: AttentionBackend, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = backend.forward(q, k, v, spec)
        ctx.backend, ctx.spec, ctx.state = backend, spec, result.state
        ctx.save_for_backward(q, k, v, result.out, result.lse)
        return result.out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        result = AttentionResult(out, lse, ctx.state)
        return (None, None, *ctx.backend.backward(dout, q, k, v, result, ctx.spec))


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | MaskPattern | None:
    """A mask function as transformers calls it: a pattern in training, its own masks otherwise."""
    from transformers.masking_utils import sdpa_mask

    if not torch.is_grad_enabled() or q_length != kv_length:
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
        )  # fmt: skip
    assert mask_function is not None
    causal, window = _classify(mask_function, q_length, batch_size)
    lengths = None if attention_mask is None else _right_padded_lengths(attention_mask)
    if causal and window is None and lengths is None:
        return None
    return MaskPattern(causal, window, lengths)


def _classify(mask_function: Callable[..., Any], tokens: int, batch: int) -> tuple[bool, int | None]:
    """Whether a mask function is causal, and its window, from single rows and a check on random pairs.

    Raises:
        ValueError: It is neither causal, nor a causal window, nor full.
    """
    last = torch.tensor(tokens - 1)
    zero = torch.tensor(0)
    row = _evaluate(mask_function, zero, last, torch.arange(tokens))
    first = int(row.to(torch.int8).argmax())
    causal = tokens == 1 or not bool(_evaluate(mask_function, zero, zero, last))
    window = tokens - first if causal and first > 0 else None
    generator = torch.Generator().manual_seed(0)
    i, j = torch.randint(0, tokens, (2, _CHECKED_PAIRS), generator=generator)
    near = torch.arange(tokens)
    rows = torch.randint(0, batch, (_CHECKED_PAIRS,), generator=generator)
    pairs = [(i, j, rows), (near, near, near % batch), (near, (near - 1).clamp_min(0), near % batch)]
    if window is not None:
        pairs += [(near, (near - window + d).clamp_min(0), near % batch) for d in (0, 1)]
    for queries, keys, row_numbers in pairs:
        expected = torch.ones_like(queries, dtype=torch.bool)
        if causal:
            expected = (keys <= queries) & (keys > queries - (window or tokens))
        if not torch.equal(_evaluate(mask_function, row_numbers, queries, keys), expected):
            raise ValueError(
                "this batch's attention mask is neither causal, nor a sliding window, nor full (packed documents or "
                "chunked attention): pass position_ids that count from 0 to the end, or an attention_mask that pads "
                "on the right"
            )
    return causal, window


def _evaluate(mask_function: Callable[..., Any], rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    result = torch.as_tensor(mask_function(rows, torch.tensor(0), queries, keys)).cpu()
    return result.expand(torch.broadcast_shapes(queries.shape, keys.shape)).bool()


def _right_padded_lengths(attention_mask: Tensor) -> tuple[int, ...] | None:
    """Valid tokens of each row of a padding mask `[batch, tokens]`; `None` if all are valid.

    Raises:
        ValueError: Padding is not on the right, or a row has no valid token.
    """
    valid = attention_mask.bool()
    lengths = valid.sum(-1)
    on_the_right = torch.arange(valid.shape[-1], device=valid.device) < lengths[:, None]
    if not torch.equal(valid, on_the_right) or bool((lengths == 0).any()):
        raise ValueError(
            "attention_mask has padding that is not on the right, or a row without tokens: pad on the right "
            '(tokenizer.padding_side = "right")'
        )
    counts = tuple(int(n) for n in lengths)
    return None if min(counts) == valid.shape[-1] else counts
