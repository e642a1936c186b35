"""TransformerEngine's norms before their first call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from torch import nn

from lightning_memo.engine.fp8_modules.global_state import PACKAGE
from lightning_memo.engine.fp8_modules.supported_fp8 import is_norm


def lock_channels(layer: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Note in the norms of TransformerEngine in a layer what their first call would note.

    From release 2.19 on, the first call of an operation fixes where its further tensors come from, of which norms have
    none, and writes that into an attribute. Layers that write attributes are not cut into slices.

    Args:
        layer: The layer, which is about to run.
        layers: All layers. Their norms are noted with those of the first one, so that layers stay alike.
    """
    if f"{PACKAGE}.pytorch.ops" in sys.modules and next(_unlocked(layer), None) is not None:
        for each in (layer, *layers):
            for norm in _unlocked(each):
                norm._lock_extra_tensor_channels()  # type: ignore[operator]


def _unlocked(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the norms that were not called yet; none of releases before 2.19."""
    for m in layer.modules():
        if getattr(m, "_extra_tensor_channels_locked", None) is False and is_norm(m):
            yield m
