"""Divides the arguments of a model call into micro-batches, whose losses add up to the loss of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memo.parallel.batches.divide_batch import IGNORED

_BY_ROW: Final = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "token_type_ids")
_WHOLE: Final = "num_items_in_batch"


def batch_size(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and the tokens of each row of a model call.

    Raises:
        ValueError: The call has no `input_ids` `[batch, tokens]`.
    """
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        given = "none" if ids is None else list(getattr(ids, "shape", ()))
        raise ValueError(
            f"pipeline_parallel_size: the model got input_ids {given}: give input_ids [batch, tokens], whose rows are "
            "divided into micro-batches"
        )
    return ids.shape[0], ids.shape[1]


def micro_batch_rows(rows: int, micro_batch_size: int) -> int:
    """Return the rows of each micro-batch of a batch.

    Args:
        rows: Rows of the batch.
        micro_batch_size: Rows of a micro-batch as the user gives them. If they do not divide those of the batch,
            micro-batches have the greatest common divisor of both.
    """
    return math.gcd(rows, micro_batch_size)


def micro_batches_of(arguments: Mapping[str, Any], micro_batch_size: int) -> list[dict[str, Any]]:
    """Return the arguments of a model call for each micro-batch.

    Each loss is divided by the labels of the whole batch.

    Args:
        arguments: The arguments by name, with `labels` `[batch, tokens]`.
        micro_batch_size: As for `micro_batch_rows`.

    Raises:
        ValueError: It is not known how to divide an argument.
    """
    rows, _ = batch_size(arguments)
    arguments = {**arguments, _WHOLE: _item_count(arguments)}
    size = micro_batch_rows(rows, micro_batch_size)
    starts = range(0, rows, size)
    return [{name: _rows(name, value, rows, start, size) for name, value in arguments.items()} for start in starts]


def _rows(name: str, value: Any, rows: int, start: int, size: int) -> Any:
    """Return some rows of an argument, or all of it if it is no tensor or the same for all rows."""
    if name == _WHOLE or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        return value
    if not isinstance(value, Tensor) or name not in _BY_ROW or value.dim() < 2 or value.shape[0] not in (1, rows):
        given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"pipeline_parallel_size: it is not known how to divide the argument {name} {given} of the "
            f"model into micro-batches: give {', '.join(_BY_ROW)} [batch, tokens] only, or set pipeline_parallel_size=1"
        )
    return value if value.shape[0] < rows else value[start : start + size]


def _item_count(arguments: Mapping[str, Any]) -> Tensor:
    """Return the number by which losses are divided, an fp32 scalar."""
    given: Tensor | None = arguments.get(_WHOLE)
    if given is not None:
        return given
    shifted = arguments.get("shift_labels")
    targets = arguments["labels"][..., 1:] if shifted is None else shifted
    ignored = arguments.get("ignore_index", IGNORED)
    # A batch without any label has loss 0, not 0 / 0.
    return (targets != ignored).sum().clamp(min=1).to(torch.float32)
