"""Normalization by the root of the mean of squares."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.ops.op import BasicOperation, OperationContext, maybe_autocast_dtype
from transformer_engine.pytorch.quantized_tensor import allocated, clear_tensor_data, kernel


def rmsnorm_fwd(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, None, Tensor]:
    """Return the normalized rows and the inverse roots, as the kernel does."""
    with kernel(), torch.no_grad():
        rsigma = (x.float().pow(2).mean(1) + eps).rsqrt()
        out = (x.float() * rsigma[:, None] * w).to(x.dtype)
    return allocated(out), None, allocated(rsigma)


def rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and the weight."""
    rsigma = rsigma[:, None]
    normal, dz = x.float() * rsigma, dz.float()
    dnormal = dz * w
    dx = (dnormal - normal * (dnormal * normal).mean(1, keepdim=True)) * rsigma
    return dx.to(x.dtype), (dz * normal).sum(0).to(w.dtype)


class RMSNorm(BasicOperation):
    """Normalization by the root of the mean of squares."""

    def __init__(self, normalized_shape: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, False
        self._sm_margins = {"forward": 0, "backward": 0, "inference": 0}
        self.weight = nn.Parameter(torch.ones(normalized_shape))

    def op_forward(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        dtype = maybe_autocast_dtype(device_type=input_.device.type, default_dtype=self.weight.dtype)
        x = input_.contiguous().to(dtype).view((-1, math.prod(self.weight.shape)))
        y, _, rstdevs = rmsnorm_fwd(x, self.weight.to(dtype), self.eps)
        if ctx.requires_grad:
            ctx.save_for_backward(x, rstdevs)
            ctx.dtype = dtype
        return y.view(input_.shape)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, rstdevs = ctx.saved_tensors
        dy = grad_output.contiguous().to(ctx.dtype).view(x.shape)
        dx, dw = rmsnorm_bwd(dy, x, rstdevs, self.weight.to(ctx.dtype))
        clear_tensor_data(x)
        clear_tensor_data(rstdevs)
        return dx.view(grad_output.shape), (dw,)
