"""What is done to quantized tensors from outside."""

from __future__ import annotations

from typing import Any


def clear_columnwise_cache(tensor: Any) -> None:
    """Let go of what products by columns read, which FSDP2 has not allocated and does not free."""
    for name in ("_columnwise_data", "_columnwise_scale_inv", "_transpose"):
        if hasattr(tensor, name):
            setattr(tensor, name, None)
