"""The stand-in for TransformerEngine, which each test imports anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.transformer_engine_stand_in import stand_in


@pytest.fixture
def te() -> Iterator[Any]:
    """Return `transformer_engine.pytorch`."""
    with stand_in() as package:
        yield package
