"""A fixture that forbids logits of all tokens."""

from __future__ import annotations

import pytest
from torch import Tensor

from lightning_memo.loss.lazy_logits import LazyLogits


@pytest.fixture
def only_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if the logits of all tokens are computed at once."""

    def refuse(logits: LazyLogits) -> Tensor:
        raise AssertionError("whole logits")

    monkeypatch.setattr(LazyLogits, "materialize", refuse)
