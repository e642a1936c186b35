"""Holds the token layout of the current batch for the modules that need it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from lightning_memo.parallel.batches.token_layout import TokenLayout


class CurrentLayout:
    """The layout of the current batch. The object that divides batches owns and sets it.

    Attributes:
        layout: Layout of the tokens of the batch; `None` if this rank holds all tokens in order.
        text_model: The module whose forward divides the tokens: see Note: [Where tokens are divided]. `None` if the
            batch is divided before any module gets it.
        largest_position: Returns the largest position of the batch, while the model gets some of its rows only;
            otherwise `None`.
    """

    def __init__(self) -> None:
        self.layout: TokenLayout | None = None
        self.text_model: nn.Module | None = None
        self.largest_position: Callable[[], int] | None = None
        self._beside: CurrentLayout | None = None

    def clear(self) -> None:
        """Reset the layout when no batch is in use."""
        self.layout = None

    @contextlib.contextmanager
    def of_rows(self, largest_position: Callable[[], int]) -> Iterator[None]:
        """Within this context, the model gets some rows of the batch at a time, whose largest position is given."""
        self.largest_position = largest_position
        try:
            yield
        finally:
            self.largest_position = None

    def seen_by(self, module: nn.Module) -> CurrentLayout:
        """Return what a module sees: no layout, if it is beside the text model and computes what it is given."""
        text = self.text_model
        if text is None or module in set(text.modules()) or text in set(module.modules()):
            return self
        self._beside = self._beside or CurrentLayout()
        return self._beside
