"""The token-wise engine: slices, swapping, recomputation. Knows nothing of Lightning."""

from lightning_memo.engine.copies import TestMode
from lightning_memo.engine.engine import Engine

__all__ = ["Engine", "TestMode"]
