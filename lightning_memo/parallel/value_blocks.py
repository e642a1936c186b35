"""Blocks of values, each of which gets a scale of its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from lightning_memo.artifacts.compressed_layout import BLOCK


def value_blocks(t: Tensor) -> Iterator[Tensor]:
    """Yield whole blocks, and the rest of the values with zeros behind them, each `[blocks, BLOCK]`.

    Args:
        t: The values, `[values]`.
    """
    whole = len(t) // BLOCK * BLOCK
    if whole:
        yield t[:whole].view(-1, BLOCK)
    if whole < len(t):
        yield functional.pad(t[whole:], (0, whole + BLOCK - len(t)))[None]
