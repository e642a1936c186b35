"""Images in the forms that processors of transformers make them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CHANNELS = 3
Images = dict[str, Tensor]


def image_inputs(model: Any, count: int) -> Iterator[Images]:
    """Yields images in the forms that a model may accept, an image for each sequence.

    `tokens` is the number of tokens that stand for an image in a text, which the model's own features tell.

    Args:
        model: The model.
        count: Number of images.
    """
    vision = getattr(model.config, "vision_config", None) or getattr(model.config, "encoder", None) or model.config
    accepted = inspect.signature(model.forward).parameters
    for images in _forms(vision, count):
        if all(name in accepted for name in images):
            tokens = _tokens(model, images, count)
            for number in (tokens, 0) if tokens else (0,):
                yield {**images, "tokens": torch.tensor(number)}


def _forms(vision: Any, count: int) -> Iterator[Images]:
    size = _side(vision, "image_size", 32)
    patch = _side(vision, "patch_size", 8)
    pixels = _random(count, _CHANNELS, size, size)
    frames, merge = getattr(vision, "temporal_patch_size", 1), getattr(vision, "spatial_merge_size", 2)
    side = 2 * merge
    grid = torch.tensor([[1, side, side]] * count)
    patches = _random(count * side * side, _CHANNELS * frames * patch * patch)
    yield {"pixel_values": patches, "image_grid_thw": grid}
    yield {"pixel_values": patches, "grid_thw": grid}
    yield {"pixel_values": pixels, "image_sizes": torch.tensor([[size, size]] * count)}
    tiles = _random(count, 2, _CHANNELS, size, size)
    yield {"pixel_values": tiles, "image_sizes": torch.tensor([[size, size]] * count)}
    yield {"pixel_values": pixels}
    yield {"pixel_values": tiles}
    yield {"pixel_values": pixels[:, None]}
    yield {"flattened_patches": torch.cat([_positions(count), _random(count, 16, _CHANNELS * patch * patch)], -1)}


def _positions(count: int) -> Tensor:
    """Returns the row and the column of each of 16 patches."""
    return torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).float().repeat(count, 1, 1)


def _side(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None) or default
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _tokens(model: Any, images: Images, count: int) -> int:
    """Returns the number of features that the model makes of an image; 0 if it does not tell."""
    of_images = getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)
    if of_images is None:
        return 0
    with contextlib.suppress(Exception), torch.no_grad():
        features = of_images(**images)
        features = getattr(features, "pooler_output", features)
        tensors = features if isinstance(features, (list, tuple)) else [features]
        return int(sum(t.numel() for t in tensors) // tensors[0].shape[-1] // count)
    return 0
