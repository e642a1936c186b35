"""The inputs of a model that runs slice by slice: what they are, and which no slice can compute with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memo.engine.attention.hugging_face import right_padded_lengths
from lightning_memo.kernels.async_transfer import to_device_async

IGNORED = -100


def named_inputs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that they have in `forward`."""
    names = list(inspect.signature(forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


def token_tensor(inputs: dict[str, Any]) -> Tensor:
    """`input_ids` `[batch, tokens]`, or `inputs_embeds` `[batch, tokens, hidden]`.

    Raises:
        ValueError: There is neither.
    """
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(inputs.get(name), Tensor):
            tokens: Tensor = inputs[name]
            return tokens
    raise ValueError('schedule="slice" cuts input_ids or inputs_embeds, and the model got neither')


def on_device(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs on the device: a batch may wait on the host, of which a slice is needed at a time."""
    return {name: to_device_async(t, device) if isinstance(t, Tensor) else t for name, t in inputs.items()}


def check_sliceable(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Make sure that slices can be computed one by one.

    Raises:
        ValueError: Something is asked for that needs all tokens at once.
    """
    name = type(model).__name__
    cache, embeds = inputs.get("past_key_values"), inputs.get("inputs_embeds")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(f'{name} got keys and values of a prefix: schedule="slice" has no place for them; use "layer"')
    positions = inputs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        raise ValueError(
            f'{name} got position_ids {list(positions.shape)}: schedule="slice" takes those of text, [batch, tokens]; '
            'use schedule="layer"'
        )
    if embeds is not None and embeds.requires_grad:
        raise ValueError(
            f'{name} got inputs_embeds that are trained: schedule="slice" takes input_ids or embeddings without '
            'gradient; use schedule="layer"'
        )
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise ValueError(
            f'schedule="slice" computes the loss of each slice by itself, and {name} got no labels: pass labels, or '
            'use schedule="layer"'
        )
    if inputs.get("output_router_logits", getattr(getattr(model, "config", None), "output_router_logits", False)):
        raise ValueError(
            f"{name} has an auxiliary loss over the routers of all tokens, which no slice can compute: set "
            'output_router_logits=False, or use schedule="layer"'
        )


def without_labels(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | int, Tensor | float]:
    """The inputs that are not about the loss, the number of labels, and what the loss is multiplied by at last.

    A batch without any label has a loss of NaN and a gradient of zero, as a mean has: 0 / 0 in every slice would have a
    gradient of NaN. Padding on the right is seen by no other token.

    Raises:
        ValueError: Padding is not on the right.
    """
    rest = dict(inputs)
    count, factor = rest.pop("num_items_in_batch", None), 1.0
    if count is None:
        shifted = inputs.get("shift_labels")
        count = ((inputs["labels"][:, 1:] if shifted is None else shifted) != IGNORED).sum()
        factor = torch.where(count > 0, 1.0, torch.nan)
        count = count.clamp_min(1)
    mask = rest.pop("attention_mask", None)
    if mask is not None:
        right_padded_lengths(mask)
    for name in ("labels", "shift_labels", "past_key_values"):
        rest.pop(name, None)
    return rest | {"use_cache": False}, count, factor
