"""Operations, which may be fused: here, each is one of its own."""

from transformer_engine.pytorch.ops import fuser  # noqa: F401  (loaded with the package)
from transformer_engine.pytorch.ops.basic.layer_norm import LayerNorm
from transformer_engine.pytorch.ops.basic.rmsnorm import RMSNorm

__all__ = ["LayerNorm", "RMSNorm"]
