"""Reads the position ids of a batch: packed documents and the largest position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
