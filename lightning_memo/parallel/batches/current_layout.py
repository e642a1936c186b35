"""The layout of the batch that a model is given, for everything that has to know which tokens these are."""

from __future__ import annotations

from lightning_memo.parallel.batches.token_layout import TokenLayout


class CurrentLayout:
    """Holds the layout of the current batch; whoever divides batches owns it and sets it.

    Attributes:
        layout: Where the tokens of the batch are; `None` if this process holds all of them in order.
    """

    def __init__(self) -> None:
        self.layout: TokenLayout | None = None

    def clear(self) -> None:
        """Forget the layout: no batch is in use."""
        self.layout = None
