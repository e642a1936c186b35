"""Routes the attention of Hugging Face models to the engine, without changes to their code."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memo.engine.attention.sliced_attention import attend
from lightning_memo.engine.forward.autocast import autocast_inputs
from lightning_memo.engine.forward.intercept import current_handler
from lightning_memo.kernels import AttentionSpec, select_backend
from lightning_memo.parallel.batches.current_layout import CurrentLayout
from lightning_memo.parallel.batches.positions import right_padded_lengths
from lightning_memo.utils.find_layers import find_hugging_face

# The name must not contain "flash": transformers would look for kernels on the hub.
ATTENTION_NAME = "lightning_memo"
# Arguments of attention functions that change the result and are not supported here.
_UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_mask")
_CHECKED_PAIRS = 4096

Documents = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """Description of a model's mask, in place of the mask `[tokens, tokens]`, which is too large to build.

    Attributes:
        causal: Whether queries see no later key; `None` if the attention module decides.
        window: Number of positions that a query sees, including its own; `None` means all.
        lengths: Number of valid tokens of each batch row, with padding on the right; `None` means all.
        documents: Start positions of the packed documents of each batch row. Attention does not cross document
            boundaries.
    """

    causal: bool | None
    window: int | None
    lengths: tuple[int, ...] | None = None
    documents: Documents | None = None

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """Refuse arithmetic: the model adds the mask to its scores itself."""
        raise _used_as_mask()

    def __getitem__(self, _: Any) -> Any:
        raise _used_as_mask()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise _used_as_mask()


def _used_as_mask() -> ValueError:
    return ValueError(
        "the model computes attention itself, as models with ALiBi and some older models do, and needs an attention "
        "mask of tokens by tokens, which is not built: train it with context_parallel_size=1 and "
        "sequence_parallel=False"
    )


def attach_attention(model: nn.Module, current: CurrentLayout) -> list[Callable[[], None]]:
    """Make every Hugging Face model inside `model` call the engine's attention.

    transformers registers attention functions for the complete process. The registered function therefore belongs to no
    engine and no model: it finds the running slice through `current_handler`, and the layout of the batch in `current`.

    Args:
        model: The module that contains the models.
        current: Holds the layout of the batches that `model` is given.

    Returns:
        Functions that undo the change.
    """
    outermost = find_hugging_face(model)  # submodels share their attention setting
    if not outermost:
        return []
    name = _register(current)
    undo: list[Callable[[], None]] = []
    for host in outermost:
        before = host.config._attn_implementation
        undo.append(lambda host=host, before=before: host.set_attn_implementation(before))  # type: ignore[misc]
        host.set_attn_implementation(name)
    return undo


@contextlib.contextmanager
def collecting_nothing() -> Iterator[None]:
    """Inside this context, transformers' hooks do not collect outputs (router logits, hidden states)."""
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


def _register(current: CurrentLayout) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"{ATTENTION_NAME}_{id(current):x}"  # `current` is held from now on, so its id stays its own
    AttentionInterface.register(name, functools.partial(_attention, current))
    AttentionMaskInterface.register(name, functools.partial(_mask, current))
    return name


def _attention(
    current: CurrentLayout,
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
    if current.layout is not None:
        _check_among_processes(module, handler, attention_mask, sliding_window)
    if handler is None and not isinstance(attention_mask, MaskPattern):
        return _sdpa_of_transformers(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    for name in _UNKNOWN_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} calls attention with {name}, which lightning_memo's attention kernels do not "
                "compute: train this model without MemoStrategy"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    spec = _spec(attention_mask, bool(causal), sliding_window, dropout, scaling)
    if handler is not None:
        out = handler(query, key, value, spec)
    else:
        query, key, value = autocast_inputs(query, key, value)
        out = attend(select_backend(query, key, value, spec), query, key, value, spec)
    return out.transpose(1, 2).contiguous(), None


def _spec(
    mask: Tensor | MaskPattern | None, causal: bool, window: int | None, dropout: float, scale: float | None
) -> AttentionSpec:
    if isinstance(mask, MaskPattern):
        causal = causal if mask.causal is None else mask.causal
        return AttentionSpec(causal, scale, mask.window, dropout, mask.lengths, documents=mask.documents)
    if mask is not None:
        return AttentionSpec(False, scale, None, dropout, mask=mask)
    return AttentionSpec(causal, scale, window if causal else None, dropout)


def _check_among_processes(module: nn.Module, handler: object, mask: object, window: int | None) -> None:
    """Check an attention call while the tokens of a sequence are divided over processes.

    Raises:
        ValueError: The call would see only this process's tokens, or its mask is not supported.
    """
    name = type(module).__name__
    if handler is None:
        raise ValueError(
            f"{name} attends outside of the repeated layers, where the tokens of other processes are not available: "
            "train this model with context_parallel_size=1 and sequence_parallel=False"
        )
    if not isinstance(mask, MaskPattern) or mask.window != window:
        raise ValueError(
            f"{name} has an attention mask that is neither causal, nor a sliding window, nor full: train this model "
            "with context_parallel_size=1 and sequence_parallel=False"
        )


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


def _mask(
    current: CurrentLayout,
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
    """Mask function with transformers' signature: returns a pattern in training, and transformers' mask otherwise."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if current.layout is not None:
        return MaskPattern(None, kwargs.get("local_size"))
    if not torch.is_grad_enabled() or q_length != kv_length:
        known = _known_pattern(mask_function, q_length, kv_length, batch_size, attention_mask, kwargs.get("local_size"))
        return known or sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
        )  # fmt: skip
    assert mask_function is not None
    lengths = None if attention_mask is None else right_padded_lengths(attention_mask)
    if mask_function is causal_mask_function and lengths is None:
        return None  # the most frequent case; classifying the function takes long compared with a short step
    pattern = _classify(mask_function, q_length, batch_size, kwargs.get("local_size"))
    if pattern == MaskPattern(True, None) and lengths is None:
        return None
    return replace(pattern, lengths=lengths)


def _known_pattern(
    mask_function: Callable[..., Any] | None,
    q_length: int,
    kv_length: int,
    batch: int,
    attention_mask: Tensor | None,
    local_size: int | None,
) -> MaskPattern | None:
    """Return a pattern for a mask of packed documents or padding outside of training.

    Returns:
        The pattern; `None` if transformers needs no mask of all queries and keys, or if its own mask must be used (a
        cache, padding on the left, chunked attention).
    """
    if mask_function is None or q_length != kv_length:
        return None
    try:
        lengths = None if attention_mask is None else right_padded_lengths(attention_mask)
        pattern = replace(_classify(mask_function, q_length, batch, local_size), lengths=lengths)
    except ValueError:
        return None
    return pattern if pattern.documents is not None or lengths is not None else None


def _classify(mask_function: Callable[..., Any], tokens: int, batch: int, local_size: int | None) -> MaskPattern:
    """Find the pattern of a mask function from neighbouring tokens, and check it on random pairs of tokens.

    Args:
        mask_function: A mask function of transformers.
        tokens: Number of queries and of keys.
        batch: Number of batch rows.
        local_size: The window or chunk size that the model gives, if any.

    Raises:
        ValueError: Within documents, the mask is neither causal, nor a causal window, nor full.
    """
    near = torch.arange(tokens)
    joined = torch.stack([_evaluate(mask_function, torch.tensor(b), near[1:], near[:-1]) for b in range(batch)])
    starts = [torch.cat([near[:1], near[1:][~seen]]) for seen in joined]
    document = torch.stack([torch.searchsorted(s, near, right=True) for s in starts])
    neighbours = joined.nonzero()[:1]  # a token and the next one in the same document
    causal = not any(bool(_evaluate(mask_function, row, first, first + 1)) for row, first in neighbours)
    window = local_size if causal and local_size is not None and local_size < tokens else None
    generator = torch.Generator().manual_seed(0)
    i, j = torch.randint(0, tokens, (2, _CHECKED_PAIRS), generator=generator)
    rows = torch.randint(0, batch, (_CHECKED_PAIRS,), generator=generator)
    pairs = [(i, j, rows), (near, near, near % batch), (near, (near - 1).clamp_min(0), near % batch)]
    if window is not None:
        pairs += [(near, (near - window + d).clamp_min(0), near % batch) for d in (0, 1)]
    for queries, keys, row_numbers in pairs:
        expected = document[row_numbers, queries] == document[row_numbers, keys]
        if causal:
            expected &= (keys <= queries) & (keys > queries - (window or tokens))
        if not torch.equal(_evaluate(mask_function, row_numbers, queries, keys), expected):
            raise ValueError(
                "this batch's attention mask is neither causal, nor a sliding window, nor full (for example chunked "
                "attention, or position_ids with gaps): pass position_ids that count from 0 in each packed document, "
                "or an attention_mask that pads on the right"
            )
    packed = any(s.numel() > 1 for s in starts)
    return MaskPattern(causal, window, documents=tuple(tuple(s.tolist()) for s in starts) if packed else None)


def _evaluate(mask_function: Callable[..., Any], rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    result = torch.as_tensor(mask_function(rows, torch.tensor(0), queries, keys)).cpu()
    return result.expand(torch.broadcast_shapes(queries.shape, keys.shape)).bool()
