"""TransformerEngine for PyTorch, on a CPU."""

from transformer_engine.pytorch import ops
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.module import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
)

__all__ = [
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "ops",
]
