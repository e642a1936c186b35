"""Reads the position ids and the padding mask of a batch: packed documents, the largest position, row lengths."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def why_positions_unknown(model: nn.Module) -> str:
    """Returns why a model cannot be told the positions of some of its tokens, as a clause; empty if it can."""
    parts = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    if not any("position_ids" in inspect.signature(part.forward).parameters for part in parts):
        return "takes no position_ids"
    if any(_counts_padding(module) for module in model.modules()):
        return "counts positions by the padding tokens among all tokens"
    return ""


def _counts_padding(module: nn.Module) -> bool:
    """Returns whether a module's positions begin after the id of the padding token, like RoBERTa's and fairseq's."""
    table = getattr(module, "position_embeddings", None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        return True
    return hasattr(module, "create_position_ids_from_input_ids") and getattr(module, "padding_idx", None) is not None


def packed_documents(batch: Mapping[str, Any], rows: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the positions at which packed documents start in each row; `None` if rows are not packed.

    As in transformers, a document starts where position ids do not increase by one and the batch has no attention mask.

    Args:
        batch: Batch with `position_ids` `[rows or 1, tokens]`, if any. Those of several axes tell of documents if the
            first of four axes has the positions in the text.
        rows: Number of rows of the batch.
    """
    positions = batch.get("position_ids")
    if positions is None or batch.get("attention_mask") is not None:
        return None
    if positions.ndim == 3:
        if len(positions) != 4:
            return None
        positions = positions[0]
    jumps = (positions.diff() != 1).cpu()
    if not jumps.any():
        return None
    starts = tuple((0, *(row.nonzero()[:, 0] + 1).tolist()) for row in jumps)
    return starts * (rows // len(starts))


def held(positions: Tensor, tokens: int) -> Tensor:
    """Pads positions `[..., tokens]` on the right with the last one, because position tables may end there."""
    missing = tokens - positions.shape[-1]
    return torch.cat([positions, positions[..., -1:].expand(*positions.shape[:-1], missing)], -1)


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


def valid_ranges(attention_mask: Tensor) -> list[tuple[int, int]] | None:
    """Returns the first and the end of the valid tokens of each row of a padding mask `[batch, tokens]`.

    A row without valid tokens begins and ends after its last token. The result is empty if all tokens are valid, and
    `None` if the valid tokens of a row do not follow one another.
    """
    valid = attention_mask.bool()
    first, count = first_and_count(valid)
    # The host waits once for all.
    rows = list(zip(*torch.stack([first, first + count, valid.any(-1)]).tolist(), strict=True))
    tokens = valid.shape[-1]
    if any(start == stop and some for start, stop, some in rows):
        return None
    if all((start, stop) == (0, tokens) for start, stop, _ in rows):
        return []
    return [(start, stop) if some else (tokens, tokens) for start, stop, some in rows]


def first_and_count(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first true entry of each row of a boolean `[..., entries]`, and the number of true entries.

    The number is 0 if the true entries of a row do not follow one another, or if there are none.
    """
    entries = valid.view(torch.uint8)  # sums of booleans take much longer
    runs = (valid[..., 1:] > valid[..., :-1]).view(torch.uint8).sum(-1, dtype=torch.int32) + entries[..., 0]
    return entries.argmax(-1), torch.where(runs == 1, entries.sum(-1, dtype=torch.int32), 0)
