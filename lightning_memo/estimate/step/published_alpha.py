"""The alphas of the runs in MEMO's paper, which are lower than its linear program allows."""

from __future__ import annotations

from typing import Final

PUBLISHED_ALPHAS: Final = ((1.0, 1.0), (0.5, 0.5), (0.25, 0.125))
"""Pairs of the least alpha of the linear program and the alpha of the paper's runs. Below the last pair, they had alpha
0. The pairs are read from table 7 of the appendix, not derived."""


def published_alpha(limit: float, all_hidden: bool) -> float:
    """Return the alpha that a run of the paper would have had.

    The runs swapped more than layer inputs and attention outputs only if copies of all tokens could be hidden.

    Args:
        limit: Alpha of the linear program.
        all_hidden: Whether the forward, without waiting for the network, is longer than the copies of all tokens.
    """
    return next((alpha for least, alpha in PUBLISHED_ALPHAS if all_hidden and limit >= least), 0.0)
