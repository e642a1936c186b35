"""What a Hugging Face model has to be told of a divided batch, also where a step passes it entries by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_memo.parallel.batches.current_layout import CurrentLayout

_ADDED = ("position_ids", "shift_labels", "num_items_in_batch")


class LossArguments:
    """Completes a model's arguments from the batch of the step.

    A step that calls `self.model(input_ids=batch["input_ids"], labels=batch["labels"])` leaves out what was added to
    the batch when it was divided: positions would be wrong, labels shifted twice, and the loss weighted by this
    process's tokens. And FSDP2 casts floating-point arguments, while counts have to stay exact.

    Args:
        current: The layout of the batch, by which a model's arguments are those of some of its tokens.
    """

    def __init__(self, current: CurrentLayout) -> None:
        self._current = current
        self._batch: Mapping[str, Any] = {}

    def use(self, batch: Any) -> None:
        """Take the divided batch of the step that comes next."""
        self._batch = batch if isinstance(batch, Mapping) else {}

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Complete every call of `model`; returns what undoes it."""
        handle = model.register_forward_pre_hook(self._complete, with_kwargs=True)
        return handle.remove

    def _complete(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch, labels = self._batch, kwargs.get("labels")
        cut = self._current.layout is not None
        names = [name for name in _ADDED if batch.get(name) is not None]
        if labels is None or labels is not batch.get("labels"):
            names = [name for name in names if name == "position_ids" and cut]
        if cut and labels is not None and labels is not batch.get("labels"):
            raise ValueError(
                f"{type(model).__name__} is given labels that are not the batch's, which were shifted before the batch "
                'was divided: pass batch["labels"] as it is, or compute the loss from logits and batch["shift_labels"]'
            )
        positions = kwargs.get("position_ids")
        if cut and positions is not None and not _same(positions, batch.get("position_ids")):
            raise ValueError(
                f"{type(model).__name__} is given position_ids that are not the batch's, which are of this process's "
                "tokens: leave them out, or have the loader put position_ids [batch, tokens] into the batch"
            )
        return args, kwargs | {name: batch[name] for name in names}


def _same(positions: Tensor, of_batch: Tensor | None) -> bool:
    """Whether positions are those of a batch, maybe repeated for all its rows."""
    if of_batch is None or positions is of_batch:
        return True
    return positions.shape[-1] == of_batch.shape[-1] and bool((positions == of_batch).all())
