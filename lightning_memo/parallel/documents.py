"""Documents that were packed into one row of a batch."""

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
