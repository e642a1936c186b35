"""Where processes share the tokens of a batch: layers must run on what the strategy divided, cut as it was laid out."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memo.engine.forward.intercept import current_layout
from lightning_memo.planner.token_slices import TokenRange


def check_tokens(tokens: int) -> None:
    """Layers among whose tokens there are only some of a sequence need to know which.

    Args:
        tokens: Of a layer's input, in all shards.

    Raises:
        ValueError: The input is not of the batch that the strategy divided.
    """
    layout = current_layout()
    if layout is None or tokens != layout.local_tokens:
        expected = "no batch was" if layout is None else f"the last batch was divided into {layout.local_tokens}"
        raise ValueError(
            f"a forward of {tokens} tokens, but {expected}: with context_parallel_size or "
            "sequence_parallel models run on the batches that the steps get; generate text in one process"
        )


def divided_by_slices() -> bool:
    """Whether the batch is laid out slice by slice: it is for layers that run so, those without gradients too."""
    layout = current_layout()
    return layout is not None and layout.outside and len(layout.bounds) > 1


def check_bounds(slices: Sequence[TokenRange]) -> None:
    """Sequence-parallel shards hold their part of every slice: a batch laid out for others is in another order.

    Raises:
        RuntimeError: The batch was laid out for other slices.
    """
    layout = current_layout()
    if layout is None or (layout.shards == 1 and not layout.outside):
        return
    laid_out = layout.bounds or (slices[-1].stop,)
    if laid_out != tuple(part.stop for part in slices):
        raise RuntimeError(
            f"the batch was laid out for slices that end at {laid_out}, and layers run slices that end at "
            f"{tuple(part.stop for part in slices)}: every forward of a step has to take the strategy's batch"
        )
