"""The token-wise engine: slices, swapping, recomputation. Knows nothing of Lightning."""

from lightning_memo.engine.checked import RestoredError
from lightning_memo.engine.engine import Engine
from lightning_memo.engine.test_mode import TestMode

__all__ = ["Engine", "RestoredError", "TestMode"]
