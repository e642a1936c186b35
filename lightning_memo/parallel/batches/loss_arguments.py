"""Passes the positions and loss arguments of a divided batch to a Hugging Face model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_memo.parallel.batches.current_layout import CurrentLayout
from lightning_memo.parallel.batches.positions import why_positions_unknown
from lightning_memo.utils.class_names import class_name

_ADDED = ("position_ids", "shift_labels", "num_items_in_batch")


class LossArguments:
    """Adds missing arguments of a model call from the batch of the step.

    A step that calls `self.model(input_ids=batch["input_ids"], labels=batch["labels"])` omits the entries that were
    added when the batch was divided. Positions would be wrong, labels would be shifted twice, and the loss would be
    weighted by this rank's tokens. In addition, FSDP2 casts floating-point arguments, but the item count must be exact.

    Args:
        current: Holds the layout of the batch; it has one if the batch was divided by tokens.
    """

    def __init__(self, current: CurrentLayout) -> None:
        self._current = current
        self._batch: Mapping[str, Any] = {}

    def use(self, batch: Any) -> None:
        """Set the divided batch of the next step; `None` for none."""
        self._batch = batch if isinstance(batch, Mapping) else {}

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Complete the arguments of every call of `model`. Returns a function that undoes this."""
        complete = functools.partial(self._complete, why_positions_unknown(model))
        handle = model.register_forward_pre_hook(complete, with_kwargs=True)
        return handle.remove

    def _complete(
        self, why_unknown: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch, labels = self._batch, kwargs.get("labels")
        cut = self._current.layout is not None
        if cut and why_unknown:
            raise ValueError(
                f"{class_name(model)} {why_unknown}, and would count the tokens that each process holds "
                "from 0: train this model with context_parallel_size=1 and sequence_parallel=False"
            )
        names = [name for name in _ADDED if batch.get(name) is not None]
        if labels is None or labels is not batch.get("labels"):
            names = [name for name in names if name == "position_ids" and cut]
        if cut and labels is not None and labels is not batch.get("labels"):
            raise ValueError(
                f"{class_name(model)} got labels other than the batch's, which were shifted before the batch "
                'was divided: pass batch["labels"] unchanged, or compute the loss from logits and batch["shift_labels"]'
            )
        positions = kwargs.get("position_ids")
        if cut and positions is not None and not _same(positions, batch.get("position_ids")):
            raise ValueError(
                f"{class_name(model)} got position_ids other than the batch's, which belong to this process's "
                "tokens: omit them, or let the loader put position_ids [batch, tokens] into the batch"
            )
        return args, kwargs | {name: batch[name] for name in names}


def _same(positions: Tensor, of_batch: Tensor | None) -> bool:
    """Whether positions equal those of the batch, possibly expanded to all rows."""
    if of_batch is None or positions is of_batch:
        return True
    return positions.shape[-1] == of_batch.shape[-1] and bool((positions == of_batch).all())
