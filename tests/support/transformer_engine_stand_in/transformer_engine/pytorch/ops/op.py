"""What operations have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformer_engine.common.recipe import Recipe


class OperationContext:
    """What the forward of an operation leaves for its backward."""

    def __init__(self) -> None:
        self.saved_tensors: Any = None
        self.to_save: tuple[Tensor, ...] | None = None
        self._saved_tensors_range: tuple[int, int] | None = None
        self.requires_grad = True

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.to_save = tensors


class BasicOperation(nn.Module):
    """An operation with its parameters. Those here have no quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self._extra_tensor_channels_locked = False
        self._fp8_metas: dict[str, Any] | None = None
        self._quantizers: dict[str, list[Any]] | None = None

    def _lock_extra_tensor_channels(self) -> None:
        self._extra_tensor_channels_locked = True

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        if recipe is None:
            self._fp8_metas = self._quantizers = None
        elif self._fp8_metas is None or self._quantizers is None:
            self._fp8_metas = {"forward": None, "backward": None}
            self._quantizers = {"forward": [], "backward": []}

    def op_forward(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        raise NotImplementedError

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        from transformer_engine.pytorch.ops.fuser import OperationFuser

        return OperationFuser([self])(input)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state.numel() == 0


def maybe_autocast_dtype(*, device_type: str, default_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of PyTorch's autocast, if it is active (`ops/_common.py`)."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else default_dtype
