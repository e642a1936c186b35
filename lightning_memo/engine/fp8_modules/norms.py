"""TransformerEngine's norms before their first call."""

from __future__ import annotations

import sys

from torch import nn

from lightning_memo.engine.fp8_modules.global_state import PACKAGE
from lightning_memo.engine.fp8_modules.supported_fp8 import is_norm


def lock_channels(layer: nn.Module) -> None:
    """Note in the norms of TransformerEngine in a layer what their first call would note.

    From release 2.19 on, the first call of an operation fixes where its further tensors come from, of which norms have
    none, and writes that into an attribute. Layers that write attributes are not cut into slices.

    Args:
        layer: The layer, which is about to run.
    """
    if f"{PACKAGE}.pytorch.ops" not in sys.modules:
        return
    for m in layer.modules():
        if getattr(m, "_extra_tensor_channels_locked", None) is False and is_norm(m):
            m._lock_extra_tensor_channels()  # type: ignore[operator]
