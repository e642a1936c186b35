"""Which alphas MEMO's authors ran with: fewer than their linear program allows."""

from __future__ import annotations

from typing import Final

PUBLISHED_ALPHAS: Final = ((1.0, 1.0), (0.5, 0.5), (0.25, 0.125))
"""From which alpha of the linear program on the paper's runs had which alpha. Read off its appendix, table 7: found
there, not derived. Below the last they had alpha 0."""


def published_alpha(limit: float, all_hidden: bool) -> float:
    """The alpha that the paper's runs would have had.

    They swapped more than inputs and attention outputs only where copies of all tokens would hide.

    Args:
        limit: the linear program's.
        all_hidden: whether the copies of all tokens would hide under the forward, waiting for the network left out.
    """
    return next((alpha for least, alpha in PUBLISHED_ALPHAS if all_hidden and limit >= least), 0.0)
