"""Divides the tokens of rows where the text model of a multimodal model begins.

Note: [Where tokens are divided]
A text model gets a part of the batch. A model with a vision tower gets the whole batch: it computes position ids from
all tokens, and puts the features of images in the places of their tokens. Every process therefore runs the tower and
the embedding on whole rows, and the arguments of the text model inside are divided. The gradient that the embedding and
the tower get in a process is the part that comes through its own tokens; the sum over processes is the whole gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.parallel.batches.current_layout import CurrentLayout
from lightning_memo.parallel.batches.positions import held
from lightning_memo.parallel.batches.token_layout import TokenLayout, multiple
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face, find_stacks


def trains_beside(model: nn.Module, text_model: nn.Module) -> bool:
    """Return whether weights are trained that only some batches use: those of towers, but not of the head."""
    hosts: list[Any] = find_hugging_face(model)
    heads = (head for host in hosts if (head := host.get_output_embeddings()) is not None)
    used = {p for module in (text_model, *heads) for p in module.parameters()}
    return any(p.requires_grad and p not in used for p in model.parameters())


def check_layers(model: nn.Module, text_model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Check that the layers to swap are in the text model, whose tokens are divided.

    Raises:
        ValueError: They are those of a tower.
    """
    if not set(layers) <= set(text_model.modules()):
        name = next(name for name, module in model.named_modules() if module is text_model)
        raise ValueError(
            f"context_parallel_size divides the tokens of {name}, and the layers of another part of the model were to "
            f'be swapped: set layers="{name}.{find_stacks(text_model)[0].name}"'
        )


class TextModelInputs:
    """Divides the arguments of the text model in each of its forwards.

    Args:
        current: Holds the layout of the batch.
    """

    def __init__(self, current: CurrentLayout) -> None:
        self._current = current

    def attach(self, text_model: nn.Module) -> Callable[[], None]:
        """Divide the arguments of `text_model`. Returns a function that undoes this."""
        self._current.text_model = text_model
        handle = text_model.register_forward_pre_hook(self._divide, with_kwargs=True)

        def undo() -> None:
            self._current.text_model = None
            handle.remove()

        return undo

    def _divide(
        self, text_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        layout = self._current.layout
        if layout is None:
            return args, kwargs
        # In the order of the signature, as a call may give some arguments by position.
        given = dict(zip(inspect.signature(text_model.forward).parameters, args, strict=False)) | kwargs
        whole = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        rows, tokens = whole.shape[:2]  # type: ignore[union-attr]
        if not 0 <= layout.tokens - tokens < multiple(layout.ring, layout.ulysses, layout.shards):
            raise ValueError(
                f"{class_name(text_model)} got rows of {tokens} tokens, but the last batch was divided into "
                f"{layout.local_tokens}: with context_parallel_size, run the model on the batches that its steps are "
                "given, and generate text in one process"
            )
        return (), divide_arguments(given, rows, tokens, layout)


def divide_arguments(given: Mapping[str, Any], rows: int, tokens: int, layout: TokenLayout) -> dict[str, Any]:
    """Return the arguments of a text model for the tokens of one process.

    Tensors `[rows, tokens, ...]` are padded on the right and divided. So are positions `[axes, rows, tokens]` and the
    features that are added to image tokens between layers (DeepStack). The layout knows what a padding mask says.

    Args:
        given: Arguments by name for `rows` whole rows of `tokens` tokens.
        rows: Number of rows.
        tokens: Number of tokens of each.
        layout: Layout of the tokens.
    """
    device = next(t.device for t in given.values() if isinstance(t, Tensor))
    order = layout.fed_order().to(device)

    def cut(whole: Tensor) -> Tensor:
        padding = (0, 0) * (whole.ndim - 2) + (0, layout.tokens - tokens)
        return F.pad(whole, padding).index_select(1, order)

    def is_per_token(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] in (1, rows) and value.shape[1] == tokens

    part = {name: cut(value) if is_per_token(value) else value for name, value in given.items()}
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens, device=device)[None]
    part["position_ids"] = held(positions, layout.tokens).index_select(-1, order)
    if is_per_token(given.get("attention_mask")):
        part["attention_mask"] = None
    images, features = given.get("visual_pos_masks"), given.get("deepstack_visual_embeds")
    if images is not None and features is not None:
        numbers = images.flatten().cumsum(0).view_as(images) - 1
        own = cut(numbers)[part["visual_pos_masks"]]
        part["deepstack_visual_embeds"] = [of_layer.index_select(0, own) for of_layer in features]
    return part
