"""Checks that layers get the batch that was divided over processes, cut into the slices of its layout."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.planner.token_slices import TokenRange


def check_tokens(layout: TokenLayout | None, tokens: int) -> None:
    """Check that a layer's input holds the tokens of the divided batch.

    Args:
        layout: The layout of the batch; `None` if no batch was divided.
        tokens: Number of tokens in the layer's input, all shards together.

    Raises:
        ValueError: The input belongs to another batch.
    """
    if layout is None or tokens != layout.local_tokens:
        expected = "no batch was" if layout is None else f"the last batch was divided into {layout.local_tokens}"
        raise ValueError(
            f"a forward of {tokens} tokens, but {expected}: with context_parallel_size or sequence_parallel, run the "
            "model on the batches that its steps are given, and generate text in one process"
        )


def divided_by_slices(layout: TokenLayout | None) -> bool:
    """Return whether the batch is laid out slice by slice, which layers without gradients have to follow, too."""
    return layout is not None and layout.outside and len(layout.bounds) > 1


def check_bounds(layout: TokenLayout | None, slices: Sequence[TokenRange]) -> None:
    """Check the slices of a layer against the layout. A batch that was laid out for other slices is in another order.

    Args:
        layout: The layout of the batch; `None` if no batch was divided.
        slices: The slices in which the layer runs.

    Raises:
        RuntimeError: The batch was laid out for other slices.
    """
    if layout is None or (layout.shards == 1 and not layout.outside):
        return
    laid_out = layout.bounds or (slices[-1].stop,)
    if laid_out != tuple(part.stop for part in slices):
        raise RuntimeError(
            f"the batch was laid out for slices that end at {laid_out}, but layers run slices that end at "
            f"{tuple(part.stop for part in slices)}: give every forward of a step the batch that the step was given"
        )
