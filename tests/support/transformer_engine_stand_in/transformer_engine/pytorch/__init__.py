"""TransformerEngine for PyTorch, on a CPU."""

from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.module import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast, fp8_autocast

__all__ = [
    "DelayedScaling",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "ops",
]
