"""The token-wise engine: runs layers slice by slice, and swaps or recomputes their activations. Needs no Lightning."""

from lightning_memo.engine.copy_streams import TestMode
from lightning_memo.engine.engine import Engine
from lightning_memo.engine.layers.token_sharing import TokenSharing
from lightning_memo.engine.modules.layer_classes import RequestedSettings

__all__ = ["Engine", "RequestedSettings", "TestMode", "TokenSharing"]
