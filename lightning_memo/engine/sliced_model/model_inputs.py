"""The inputs of a model that runs slice by slice, and checks that slices can compute with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.engine.token_locality.user_code import hooked_parameter
from lightning_memo.kernels.attention_kernel import to_device_async
from lightning_memo.parallel.batches.positions import right_padded_lengths, separate_documents
from lightning_memo.utils.class_names import class_name

IGNORED = -100


def named_inputs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in `forward`."""
    names = list(inspect.signature(forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


def token_tensor(inputs: dict[str, Any]) -> Tensor:
    """Return `input_ids` `[batch, tokens]`, or `inputs_embeds` `[batch, tokens, hidden]`.

    Raises:
        ValueError: The inputs have neither, or it has another number of dimensions.
    """
    for name, dims in (("input_ids", 2), ("inputs_embeds", 3)):
        tokens = inputs.get(name)
        if isinstance(tokens, Tensor):
            if tokens.dim() != dims:
                shape = "[batch, tokens]" if dims == 2 else "[batch, tokens, hidden]"
                raise ValueError(f'schedule="slice" takes {name} {shape}, but the model got {list(tokens.shape)}')
            return tokens
    raise ValueError('schedule="slice" cuts input_ids or inputs_embeds into slices, but the model got neither')


def on_device(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs on the device. A batch may be on the host, from which one slice is sent at a time."""
    return {name: to_device_async(t, device) if isinstance(t, Tensor) else t for name, t in inputs.items()}


def documents_of(model: nn.Module, inputs: dict[str, Any], rows: int) -> tuple[tuple[int, ...], ...] | None:
    """Return where the documents of each row start, as the model would find them; `None` if it would find none.

    Raises:
        ValueError: Position ids tell where documents start, and the model lets documents see each other.
    """
    if inputs.get("past_key_values") is not None:
        return None  # transformers looks for documents only if it gets no cache
    return separate_documents(model, inputs, rows, inputs.get("use_cache"))


def _setting(model: nn.Module, inputs: dict[str, Any], name: str) -> Any:
    """Return an argument of a call; if it is not given, what the model's configuration says."""
    if inputs.get(name) is not None:
        return inputs[name]
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, name, None)


def check_sliceable(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Check that slices can be computed one by one.

    Args:
        model: The causal language model.
        inputs: Its inputs by name.

    Raises:
        ValueError: The inputs ask for something that needs all tokens at once.
    """
    name = class_name(model)
    cache = inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f'{name} got keys and values of a prefix, which schedule="slice" does not take: use schedule="layer"'
        )
    _check_shapes(name, inputs)
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise ValueError(
            f'schedule="slice" computes the loss of each slice by itself, but {name} got no labels: pass labels, or '
            'use schedule="layer"'
        )
    if inputs.get("ignore_index", IGNORED) != IGNORED:
        raise ValueError(
            f'{name} is called with ignore_index={inputs["ignore_index"]}, but schedule="slice" ignores labels of '
            f'{IGNORED}: set those labels to {IGNORED}, or use schedule="layer"'
        )
    if not all(p.is_leaf for p in model.parameters()):
        raise ValueError(
            f"{name} runs with weights that are computed from others (functional_call), whose graph would be needed "
            'in each slice: use schedule="layer"'
        )
    if hooked := hooked_parameter(model):
        raise ValueError(
            f"{name} has hooks on its parameter {hooked}, which would get the gradient of each slice instead of their "
            'sum: change gradients before the optimizer steps (on_before_optimizer_step), or use schedule="layer"'
        )
    for setting, refused in (("return_dict", False), ("output_hidden_states", True)):
        if _setting(model, inputs, setting) is refused:
            raise ValueError(
                f'{name} is called with {setting}={refused}, but schedule="slice" returns the loss only: set '
                f'{setting}={not refused}, or use schedule="layer"'
            )
    if inputs.get("output_router_logits", getattr(getattr(model, "config", None), "output_router_logits", False)):
        raise ValueError(
            f"{name} has an auxiliary loss over the routers of all tokens, which no slice can compute: set "
            'output_router_logits=False, or use schedule="layer"'
        )


def _check_shapes(name: str, inputs: dict[str, Any]) -> None:
    """Check that each input of a model of this name has an entry for each token.

    Labels only have to be as many as tokens, as in the loss of transformers.
    """
    embeds = inputs.get("inputs_embeds")
    if embeds is not None and embeds.requires_grad:
        raise ValueError(
            f'{name} got inputs_embeds that require grad: schedule="slice" takes input_ids, or embeddings without '
            'gradient; for others use schedule="layer"'
        )
    rows, tokens = token_tensor(inputs).shape[:2]
    for other, t in inputs.items():
        if not isinstance(t, Tensor) or t.dim() == 0:
            continue
        taken = "text only"
        if other in ("labels", "shift_labels"):
            fits, taken = t.numel() == rows * tokens, f"{other} {[rows, tokens]}"
        elif other in ("attention_mask", "position_ids"):
            entries = (1, tokens) if other == "position_ids" else (tokens,)
            fits, taken = t.dim() == 2 and _fits(t, rows, entries), f"{other} {[rows, tokens]}"
        elif t.is_floating_point():
            fits = t.shape[:2] == (rows, tokens)
        else:  # also numbers of images or documents
            fits = t.dim() < 2 or t.shape[0] not in (1, rows) or _fits(t, rows, (1, tokens))
        if not fits:
            raise ValueError(
                f"{name} got {other} {list(t.shape)}, which does not have one entry for each of the "
                f'{tokens} tokens of a row: schedule="slice" takes {taken}; use schedule="layer"'
            )


def _fits(t: Tensor, rows: int, entries: tuple[int, ...]) -> bool:
    """Return whether a tensor has as many rows as the batch, or one for all, and one of some numbers of entries."""
    return t.shape[0] in (1, rows) and t.shape[1] in entries


def with_labels_by_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with labels `[batch, tokens]`.

    The loss of transformers takes labels of any shape, shifts them along their last dimension, and flattens them.
    """
    labels, shifted, shape = inputs.get("labels"), inputs.get("shift_labels"), token_tensor(inputs).shape[:2]
    if shifted is None and labels is not None and labels.shape != shape:
        shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return inputs if shifted is None else inputs | {"shift_labels": shifted.reshape(shape)}


def without_labels(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | int, Tensor | float]:
    """Return the inputs apart from those of the loss, the number of labels, and a factor for the loss of all slices.

    A batch without any label has a loss of NaN and a gradient of zero, like a mean. The factor makes the loss NaN;
    0 / 0 in every slice would make the gradient NaN, too. Padding on the right is dropped: no other token sees it.

    Raises:
        ValueError: Padding is not on the right, or it has labels.
    """
    rest = dict(inputs)
    count, factor = rest.pop("num_items_in_batch", None), 1.0
    shifted = inputs.get("shift_labels")
    counted = (inputs["labels"][:, 1:] if shifted is None else shifted) != IGNORED
    if count is None:
        count = counted.sum()
        factor = torch.where(count > 0, 1.0, torch.nan)
        count = count.clamp_min(1)
    mask = rest.pop("attention_mask", None)
    if mask is not None:
        right_padded_lengths(mask)
        if (counted & ~mask[:, : counted.shape[1]].bool()).any():
            raise ValueError(
                'padding has labels, which schedule="slice" does not take, as it drops the padding mask: set the '
                'labels of padding to -100, or use schedule="layer"'
            )
    for name in ("labels", "shift_labels", "past_key_values"):
        rest.pop(name, None)
    return rest | {"use_cache": False}, count, factor
