"""The token-wise engine: slices, swapping, recomputation. Knows nothing of Lightning."""

from lightning_memo.engine.copies.test_mode import TestMode
from lightning_memo.engine.engine import Engine
from lightning_memo.engine.memory.checksums import RestoredError

__all__ = ["Engine", "RestoredError", "TestMode"]
