"""Lightning precision plugin for models whose parameters are DTensors on a device mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.parallel.clip_gradients import clip_by_norm, clip_by_value, resolve_partial
from lightning_memo.parallel.zero.fsdp_units import fsdp_units


class MeshPrecision(Precision):
    """Clips gradients on any mix of meshes, and leaves mixed precision to FSDP2.

    FSDP2 casts each weight once per gather, autocast would cast it at each use.

    Args:
        inner: Plugin for the user's precision, to which everything else is delegated.
        device: Device on which collectives run.
        zero_stage: ZeRO stage.

    Attributes:
        holders: Returns the number of ranks that hold a parameter or a part of it; `None` if all do.
    """

    def __init__(self, inner: Precision, device: torch.device, zero_stage: int) -> None:
        super().__init__()
        self.precision = inner.precision
        # Autocast would cast again what FSDP2 has already cast.
        self._inner = Precision() if isinstance(inner, MixedPrecision) else inner
        self._device, self._zero_stage = device, zero_stage
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
        # With ZeRO 2, whole weights are the parameters until the next micro-batch, and shards have the gradients.
        if self._zero_stage == 2 and _sees_gradients(module):
            for unit in fsdp_units(module):
                unit.reshard()
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


def _sees_gradients(module: LightningModule) -> bool:
    """Return whether a hook of a user is called behind each backward. Those of this package leave gradients alone."""
    name, own = "on_after_backward", f"{__name__.partition('.')[0]}."
    callbacks = [c for c in module.trainer.callbacks if not type(c).__module__.startswith(own)]
    return is_overridden(name, module) or any(is_overridden(name, c, parent=Callback) for c in callbacks)
