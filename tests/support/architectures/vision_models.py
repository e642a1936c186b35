"""Tiny vision-language models, and batches of text and images as their processors make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

IMAGE, START, END = 90, 91, 92
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32, "in_channels": 3,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
TOKENS_OF_IMAGES = {"image_token_id": IMAGE, "video_token_id": 93, "vision_start_token_id": START}
# Rows and columns of patches, four of which become a token.
GRIDS = ((4, 4), (4, 8), (8, 4))


def qwen2_5_vl() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    tower = TOWER | {"depth": 2, "hidden_size": 16, "window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=tower, vision_end_token_id=END, **TOKENS_OF_IMAGES
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tower = TOWER | {
        "depth": 3, "hidden_size": 8, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 8, "rope_parameters": rope}, vision_config=tower, vision_end_token_id=END,
        **TOKENS_OF_IMAGES,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config)


def gemma3() -> nn.Module:
    """Tokens of an image see each other, and windows are narrower than a row."""
    text = TEXT | {"head_dim": 8, "sliding_window": 16, "sliding_window_pattern": 2}
    tower = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=START,
        eoi_token_index=END,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def images_in_text(
    model: str, tokens: int, images: Sequence[int], seed: int = 0, padding: int = 0
) -> dict[str, Tensor]:
    """Return a batch of random text with random images.

    Args:
        model: Name of the function that builds the model.
        tokens: Number of tokens of a row.
        images: Number of images of each row.
        seed: Seed of the random numbers.
        padding: Number of tokens of padding at the end of the first row.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 89, (len(images), tokens), generator=draw)
    grids, pixels = [], []
    for row, count in enumerate(images):
        at = int(torch.randint(1, 4, (1,), generator=draw))
        for _ in range(count):
            rows, columns = GRIDS[len(grids) % len(GRIDS)]
            grids.append((1, rows, columns))
            size = 4 if model == "gemma3" else rows * columns // 4
            shape = (1, 3, 16, 16) if model == "gemma3" else (rows * columns, 3 * 2 * 4 * 4)
            pixels.append(torch.randn(shape, generator=draw))
            ids[row, at] = START
            ids[row, at + 1 : at + 1 + size] = IMAGE
            ids[row, at + 1 + size] = END
            at += size + 2 + int(torch.randint(3, tokens // 5, (1,), generator=draw))
        assert at < tokens - padding, "the images need longer rows"
    is_image = ids == IMAGE
    ignored = is_image | (torch.rand(ids.shape, generator=draw) < 0.3)
    valid = torch.ones_like(ids)
    valid[0, tokens - padding :] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(ignored | (valid == 0), -100), "attention_mask": valid}
    batch["token_type_ids" if model == "gemma3" else "mm_token_type_ids"] = is_image.long()
    if pixels:
        batch["pixel_values"] = torch.cat(pixels)
        if model != "gemma3":
            batch["image_grid_thw"] = torch.tensor(grids)
    return batch
