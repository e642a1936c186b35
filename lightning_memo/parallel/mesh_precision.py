"""Lightning precision plugin for models whose parameters are DTensors on a device mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.parallel.clip_gradients import clip_by_norm, clip_by_value, resolve_partial


class MeshPrecision(Precision):
    """Clips gradients on any mix of meshes, and leaves mixed precision to FSDP2.

    FSDP2 casts each weight once per gather, autocast would cast it at each use.

    Args:
        inner: Plugin for the user's precision, to which everything else is delegated.
        device: Device on which collectives run.

    Attributes:
        holders: Returns the number of ranks that hold a parameter or a part of it; `None` if all do.
    """

    def __init__(self, inner: Precision, device: torch.device) -> None:
        super().__init__()
        self.precision = inner.precision
        # Autocast would cast again what FSDP2 has already cast.
        self._inner = Precision() if isinstance(inner, MixedPrecision) else inner
        self._device = device
        self.holders: Callable[[nn.Parameter], int] | None = None

    @property
    def mixed(self) -> bool:
        """Whether weights are fp32 and computation runs in bf16."""
        return str(self.precision) == "bf16-mixed"

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return self._inner.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return self._inner.convert_input(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._inner.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._inner.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self._inner.forward_context()

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        resolve_partial(module.parameters())
        return super().post_backward(tensor, module)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_norm(self._trained(optimizer), float(clip_val), self._device, self.holders)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(self._trained(optimizer), float(clip_val))

    def _trained(self, optimizer: Optimizer) -> Iterable[nn.Parameter]:
        return self.main_params(optimizer)
