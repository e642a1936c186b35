"""Batches that tiny models can be trained on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from model_types.configs import FIRST_TOKEN, LAST_TOKEN
from model_types.image_inputs import image_inputs
from model_types.levels import SLICE_TOKENS, TOKENS

Batch = dict[str, Tensor]
_BATCH, _IGNORED = 2, 0.25
_DECODER_TOKENS = 24


def batches_for(kind: str, model: Any) -> Iterator[tuple[str, Batch]]:
    """Yields batches that a model may accept, those that use most of it first, each with the name of what it holds.

    Args:
        kind: Kind of the model.
        model: The model.
    """
    ids = _text(TOKENS)
    if kind == "image-text" or model.config.model_type == "git":
        for images in image_inputs(model, _BATCH):
            yield "image and text", _with_images(model, images)
    if model.config.is_encoder_decoder:
        labels = _labels(_text(_DECODER_TOKENS, seed=1))
        yield "text", {"input_ids": ids, "decoder_input_ids": _text(_DECODER_TOKENS, seed=2), "labels": labels}
    yield "text", {"input_ids": ids, "labels": _labels(ids)}


def _text(tokens: int, seed: int = 0) -> Tensor:
    """Returns random tokens without a special meaning."""
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, (_BATCH, tokens), generator=torch.Generator().manual_seed(seed))


def _labels(ids: Tensor) -> Tensor:
    """Returns labels, some of which the loss ignores, a different number in each sequence."""
    draws = torch.rand(ids.shape, generator=torch.Generator().manual_seed(7))
    ignored = draws < _IGNORED * torch.linspace(0.5, 1.5, len(ids))[:, None]
    return ids.masked_fill(ignored, -100)


def _with_images(model: Any, images: Batch) -> Batch:
    """Returns images and text that has a token for each feature of an image, if the model has such a token."""
    images = dict(images)
    count = int(images.pop("tokens"))
    accepted = inspect.signature(model.forward).parameters
    token = _image_token(model.config)
    tokens = -(-max(TOKENS, count + 2 * SLICE_TOKENS) // SLICE_TOKENS) * SLICE_TOKENS
    ids = _text(tokens)
    is_image = torch.zeros_like(ids, dtype=torch.bool)
    if token is not None and count:
        is_image[:, 2 : 2 + count] = True
    ids = ids.masked_fill(is_image, 0 if token is None else token)
    batch = {**images, "input_ids": ids, "labels": _labels(ids).masked_fill(is_image, -100)}
    if model.config.is_encoder_decoder:
        batch |= {"decoder_input_ids": _text(_DECODER_TOKENS, seed=2), "labels": _labels(_text(_DECODER_TOKENS, 1))}
    if token is not None:
        batch |= {"token_type_ids": is_image.long(), "mm_token_type_ids": is_image.long()}
    batch |= {"image_embeds_position_mask": is_image, "qformer_input_ids": _text(8)}
    batch["image_attention_mask"] = torch.ones(*ids.shape, 1, dtype=torch.long)
    return {name: t for name, t in batch.items() if name in accepted}


def _image_token(config: Any) -> int | None:
    names = ("image_token_id", "image_token_index", "media_token_id")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
