"""Layer normalization."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.ops.op import BasicOperation, OperationContext, maybe_autocast_dtype
from transformer_engine.pytorch.quantized_tensor import allocated, clear_tensor_data, kernel


def layernorm_fwd(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized rows, their means and inverse deviations, as the kernel does."""
    with kernel(), torch.no_grad():
        mu, rsigma = x.float().mean(1), (x.float().var(1, correction=0) + eps).rsqrt()
        out = ((x.float() - mu[:, None]) * rsigma[:, None] * w + b).to(x.dtype)
    return allocated(out), allocated(mu), allocated(rsigma)


def layernorm_bwd(dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows, the weight and the bias."""
    rsigma = rsigma[:, None]
    normal, dz = (x.float() - mu[:, None]) * rsigma, dz.float()
    dnormal = dz * w
    rest = dnormal.mean(1, keepdim=True) + normal * (dnormal * normal).mean(1, keepdim=True)
    return ((dnormal - rest) * rsigma).to(x.dtype), (dz * normal).sum(0).to(w.dtype), dz.sum(0).to(w.dtype)


class LayerNorm(BasicOperation):
    """Layer normalization."""

    def __init__(self, normalized_shape: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, False
        self._sm_margins = {"forward": 0, "backward": 0, "inference": 0}
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def op_forward(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        dtype = maybe_autocast_dtype(device_type=input_.device.type, default_dtype=self.weight.dtype)
        x = input_.contiguous().to(dtype).view((-1, math.prod(self.weight.shape)))
        y, means, rstdevs = layernorm_fwd(x, self.weight.to(dtype), self.bias.to(dtype), self.eps)
        if ctx.requires_grad:
            ctx.save_for_backward(x, means, rstdevs)
            ctx.dtype = dtype
        return y.view(input_.shape)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, means, rstdevs = ctx.saved_tensors
        dy = grad_output.contiguous().to(ctx.dtype).view(x.shape)
        dx, dw, db = layernorm_bwd(dy, x, means, rstdevs, self.weight.to(ctx.dtype))
        clear_tensor_data(x)
        clear_tensor_data(means)
        clear_tensor_data(rstdevs)
        return dx.view(grad_output.shape), (dw, db)
