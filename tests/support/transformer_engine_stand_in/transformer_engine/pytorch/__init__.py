"""TransformerEngine for PyTorch, on a CPU."""

from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.module import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast

__all__ = [
    "DelayedScaling",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "autocast",
    "checkpoint",
]
