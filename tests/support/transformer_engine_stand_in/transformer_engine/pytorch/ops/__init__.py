"""Operations, which may be fused: here, each is one of its own."""

from transformer_engine.pytorch.ops.basic.layer_norm import LayerNorm
from transformer_engine.pytorch.ops.basic.rmsnorm import RMSNorm
from transformer_engine.pytorch.ops.fuser import OperationFuser

__all__ = ["LayerNorm", "OperationFuser", "RMSNorm"]
