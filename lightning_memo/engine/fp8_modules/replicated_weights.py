"""TransformerEngine's modules whose weights all processes hold whole."""

from __future__ import annotations

from torch import nn

from lightning_memo.engine.fp8_modules.global_state import engine_modules


def keep_quantized_weights(module: nn.Module) -> None:
    """Let modules of TransformerEngine keep their FP8 weights from the forward to the backward, as beside DDP.

    From release 2.16 on, they ask once whether they are in a unit of FSDP2, which PyTorch's `replicate` makes as well.
    If so, the backward quantizes the gathered weights again. With delayed scaling, it takes the scales of the next
    forward, which beside DDP it does not.

    Args:
        module: The module that is trained. None of its weights is sharded.
    """
    for m in engine_modules(module):
        if hasattr(type(m), "is_fsdp2"):
            m._is_fsdp2 = False  # type: ignore[assignment]
