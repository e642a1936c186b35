"""Holds the token layout of the current batch for the modules that need it."""

from __future__ import annotations

from torch import nn

from lightning_memo.parallel.batches.token_layout import TokenLayout


class CurrentLayout:
    """The layout of the current batch. The object that divides batches owns and sets it.

    Attributes:
        layout: Layout of the tokens of the batch; `None` if this rank holds all tokens in order.
        text_model: The module whose forward divides the tokens: see Note: [Where tokens are divided]. `None` if the
            batch is divided before any module gets it.
    """

    def __init__(self) -> None:
        self.layout: TokenLayout | None = None
        self.text_model: nn.Module | None = None
        self._beside: CurrentLayout | None = None

    def clear(self) -> None:
        """Reset the layout when no batch is in use."""
        self.layout = None

    def seen_by(self, module: nn.Module) -> CurrentLayout:
        """Return what a module sees: no layout, if it is beside the text model and computes what it is given."""
        text = self.text_model
        if text is None or module in set(text.modules()) or text in set(module.modules()):
            return self
        self._beside = self._beside or CurrentLayout()
        return self._beside
