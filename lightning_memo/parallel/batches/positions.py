"""Reads the position ids and the padding mask of a batch: packed documents, the largest position, row lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def packed_documents(batch: Mapping[str, Any], rows: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the positions at which packed documents start in each row; `None` if rows are not packed.

    As in transformers, a document starts where position ids do not increase by one and the batch has no attention mask.

    Args:
        batch: Batch with `position_ids` `[rows or 1, tokens]`, if any.
        rows: Number of rows of the batch.
    """
    positions = batch.get("position_ids")
    if positions is None or batch.get("attention_mask") is not None:
        return None
    jumps = (positions.diff() != 1).cpu()
    if not jumps.any():
        return None
    starts = tuple((0, *(row.nonzero()[:, 0] + 1).tolist()) for row in jumps)
    return starts * (rows // len(starts))


def largest_position(batch: Mapping[str, Any], tokens: int) -> int:
    """Returns the largest position of a batch. Without `position_ids`, positions count from 0."""
    positions = batch.get("position_ids")
    return tokens - 1 if positions is None else int(positions.max())


def right_padded_lengths(attention_mask: Tensor) -> tuple[int, ...] | None:
    """Returns the number of valid tokens in each row of a padding mask `[batch, tokens]`; `None` if all are valid.

    Raises:
        ValueError: Padding is not on the right, or a row has no valid token.
    """
    valid = attention_mask.bool()
    lengths = valid.sum(-1)
    on_the_right = torch.arange(valid.shape[-1], device=valid.device) < lengths[:, None]
    wrong = (valid != on_the_right).any() | (lengths == 0).any()
    is_wrong, *counts = torch.cat([wrong[None].to(lengths.dtype), lengths]).tolist()  # the host waits once for all
    if is_wrong:
        raise ValueError(
            "attention_mask has padding that is not on the right, or a row without valid tokens: pad on the right "
            '(tokenizer.padding_side = "right")'
        )
    return None if min(counts) == valid.shape[-1] else tuple(counts)
