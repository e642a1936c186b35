"""Holds the token layout of the current batch for the modules that need it."""

from __future__ import annotations

from lightning_memo.parallel.batches.token_layout import TokenLayout


class CurrentLayout:
    """The layout of the current batch. The object that divides batches owns and sets it.

    Attributes:
        layout: Layout of the tokens of the batch; `None` if this rank holds all tokens in order.
    """

    def __init__(self) -> None:
        self.layout: TokenLayout | None = None

    def clear(self) -> None:
        """Reset the layout when no batch is in use."""
        self.layout = None
