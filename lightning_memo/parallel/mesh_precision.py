"""Lightning precision plugin for models whose parameters are DTensors on device meshes, and clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.parallel.fsdp_units import fsdp_units
from lightning_memo.parallel.local_tensors import local_part, resolve_partial


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


def total_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, holders: Callable[[nn.Parameter], int] | None = None
) -> Tensor:
    """Returns the 2-norm of all gradients, the same fp32 scalar on every rank. Uses one all-reduce.

    Args:
        parameters: Parameters of this rank: plain tensors, or DTensors on any mesh.
        device: Device on which collectives run.
        holders: Returns the number of ranks that hold a parameter or a part of it; `None` if all do.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    trained = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in trained]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack([torch.linalg.vector_norm(local_part(g), dtype=torch.float32) for g in gradients])
        # `holders / shards` ranks hold a copy of each shard.
        counts = [processes if holders is None else holders(p) for p in trained]
        parts = [_shards(g) / count for g, count in zip(gradients, counts, strict=True)]
        shares = torch.tensor(parts, dtype=torch.float64, device=device)
        total = norms.to(device).double().square() @ shares
    if processes > 1:
        dist.all_reduce(total)
    return total.sqrt().float()


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    largest: float,
    device: torch.device,
    holders: Callable[[nn.Parameter], int] | None = None,
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `largest`.

    Args:
        parameters: Parameters as for :func:`total_norm`.
        largest: Largest allowed norm.
        device: Device on which collectives run.
        holders: As for :func:`total_norm`.

    Returns:
        The norm before scaling, an fp32 scalar.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = total_norm(parameters, device, holders)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        gradient = local_part(parameter.grad)
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def clip_by_value(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """Clamp all gradients in place to `[-largest, largest]`."""
    parameters = [p for p in parameters if p.grad is not None]
    for parameter in parameters:
        local_part(parameter.grad).clamp_(-largest, largest)


def _shards(gradient: Tensor) -> int:
    """Returns the number of shards that a gradient is divided into."""
    if not isinstance(gradient, DTensor):
        return 1
    shards = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        if not placement.is_replicate():
            shards *= size
    return shards
