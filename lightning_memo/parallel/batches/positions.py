"""What the positions of a batch tell: which documents were packed into a row, and how far positions go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def packed_documents(batch: Mapping[str, Any], rows: int) -> tuple[tuple[int, ...], ...] | None:
    """Where packed documents start in each row; as in transformers, where positions jump and there is no mask."""
    positions = batch.get("position_ids")
    if positions is None or batch.get("attention_mask") is not None:
        return None
    jumps = (positions.diff() != 1).cpu()
    if not jumps.any():
        return None
    starts = tuple((0, *(row.nonzero()[:, 0] + 1).tolist()) for row in jumps)
    return starts * (rows // len(starts))


def largest_position(batch: Mapping[str, Any], tokens: int) -> int:
    """The largest position of a batch; without `position_ids`, tokens are counted from 0."""
    positions = batch.get("position_ids")
    return tokens - 1 if positions is None else int(positions.max())
