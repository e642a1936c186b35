"""The states of recipes, which make quantizers. In TransformerEngine, they are in `quantization.py`."""

from __future__ import annotations

from typing import Any

import torch
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.quantization import get_fp8_torch_dtype
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

# TransformerEngine's is always "cuda".
_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class RecipeState:
    """What a module keeps for a recipe, in the forward or the backward."""

    def __init__(self, recipe: Any, *, mode: str, num_quantizers: int = 1) -> None:
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.dtype = get_fp8_torch_dtype(recipe, mode == "forward")

    @staticmethod
    def create(recipe: Recipe, *, mode: str, num_quantizers: int = 1) -> RecipeState:
        if recipe.delayed():
            return DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=num_quantizers)
        if recipe.float8_current_scaling():
            return Float8CurrentScalingRecipeState(recipe, mode=mode, num_quantizers=num_quantizers)
        if recipe.float8_block_scaling():
            return Float8BlockScalingRecipeState(recipe, mode=mode, num_quantizers=num_quantizers)
        assert recipe.mxfp8(), recipe
        return MXFP8BlockScalingRecipeState(recipe, mode=mode, num_quantizers=num_quantizers)

    def make_quantizers(self) -> list[Any]:
        raise NotImplementedError


class DelayedScalingRecipeState(RecipeState):
    """Scales and histories of maxima, of which the quantizers have views."""

    def __init__(self, recipe: Any, *, mode: str, num_quantizers: int = 1) -> None:
        super().__init__(recipe, mode=mode, num_quantizers=num_quantizers)
        self.scale = torch.ones(num_quantizers, dtype=torch.float32, device=_DEVICE)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, dtype=torch.float32, device=_DEVICE)

    def make_quantizers(self) -> list[Any]:
        amaxes = self.amax_history[0]
        return [Float8Quantizer(self.scale[i], amaxes[i].reshape((1,)), self.dtype) for i in range(self.num_quantizers)]


class Float8CurrentScalingRecipeState(RecipeState):
    """No state."""

    def make_quantizers(self) -> list[Any]:
        return [Float8CurrentScalingQuantizer(self.dtype) for _ in range(self.num_quantizers)]


class MXFP8BlockScalingRecipeState(RecipeState):
    """No state."""

    def make_quantizers(self) -> list[Any]:
        in_blocks = self.mode == "forward" and self.recipe.enable_2d_quantization
        return [
            MXFP8Quantizer(self.dtype, with_2d_quantization=in_blocks and index % 3 == 1)  # a weight
            for index in range(self.num_quantizers)
        ]


class Float8BlockScalingRecipeState(RecipeState):
    """No state. Weights have blocks of two dimensions, and all else of one."""

    def make_quantizers(self) -> list[Any]:
        return [self._make(index) for index in range(self.num_quantizers)]

    def _make(self, index: int) -> Float8BlockQuantizer:
        is_weight = self.mode == "forward" and index % 3 == 1
        recipe = self.recipe
        others = recipe.x_block_scaling_dim if self.mode == "forward" else recipe.grad_block_scaling_dim
        return Float8BlockQuantizer(self.dtype, block_scaling_dim=recipe.w_block_scaling_dim if is_weight else others)
