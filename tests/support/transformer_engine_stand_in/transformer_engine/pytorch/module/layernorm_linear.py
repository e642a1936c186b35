"""A layer norm with a linear module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    assert_dim_for_fp8_exec,
    cast_if_needed,
    general_gemm,
    grad_output_preprocess,
    quantize_weight,
    weight_for_dgrad,
)
from transformer_engine.pytorch.module.linear import _check_fp8_reduce_and_update
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensorStorage,
    clear_tensor_data,
    prepare_for_saving,
    restore_from_func_ctx,
)
from transformer_engine.pytorch.tensor.utils import clear_columnwise_cache

EPS = 1e-5


def apply_normalization(x: Tensor, weight: Tensor, bias: Tensor, quantizer: Any) -> tuple[Any, Tensor, Tensor]:
    """Return the normalized rows, quantized if there is a quantizer, their means and inverse deviations."""
    mu = x.float().mean(1)
    rsigma = (x.float().var(1, correction=0) + EPS).rsqrt()
    out = ((x.float() - mu[:, None]) * rsigma[:, None] * weight + bias).to(x.dtype)
    return (out if quantizer is None else quantizer(out)), mu, rsigma


def normalization_backward(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows, the weight and the bias."""
    rsigma = rsigma[:, None]
    normal, dz = (x.float() - mu[:, None]) * rsigma, dz.float()
    dnormal = dz * weight
    rest = dnormal.mean(1, keepdim=True) + normal * (dnormal * normal).mean(1, keepdim=True)
    return ((dnormal - rest) * rsigma).to(x.dtype), (dz * normal).sum(0), dz.sum(0)


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, ln_weight: Tensor, ln_bias: Tensor, weight: Tensor, bias: Tensor, args: dict[str, Any]
    ) -> Tensor:
        fp8, dtype, is_grad_enabled = args["fp8"], args["activation_dtype"], args["is_grad_enabled"]
        is_fsdp2 = args["is_fsdp2"]
        input_quantizer, weight_quantizer, grad_output_quantizer = args["quantizers"]
        backward_needs_input = is_grad_enabled and weight.requires_grad
        inputmat = cast_if_needed(inp.view(-1, inp.shape[-1]), dtype)
        if fp8:
            assert_dim_for_fp8_exec(inputmat, weight)
            input_quantizer.set_usage(rowwise=True, columnwise=backward_needs_input)
        ln_out, mu, rsigma = apply_normalization(inputmat, ln_weight, ln_bias, input_quantizer if fp8 else None)
        origin_weight = weight
        weightmat: Any = cast_if_needed(weight, dtype)
        if fp8:
            weight_quantizer.set_usage(rowwise=True, columnwise=is_grad_enabled and not is_fsdp2)
            weightmat = quantize_weight(tensor=weight, quantizer=weight_quantizer, workspaces={}, name=None)
            weightmat.update_usage(rowwise_usage=True)
        out = general_gemm(weightmat, ln_out, dtype, bias=bias).view(*inp.shape[:-1], weight.shape[0])
        if not weight.requires_grad:
            clear_tensor_data(ln_out)
            ln_out = None
        if not is_grad_enabled:
            return out
        ln_out_to_save, wt_save = ln_out, weightmat
        if is_fsdp2 and weightmat is not weight:
            wt_save = None
        if fp8 and backward_needs_input:
            ln_out.update_usage(rowwise_usage=False)
        tensors_to_save, tensor_objects = prepare_for_saving(
            inputmat, wt_save, origin_weight, bias, ln_weight, ln_out_to_save, mu, rsigma
        )
        ctx.save_for_backward(*tensors_to_save)
        ctx.tensor_objects = tensor_objects
        ctx.fp8, ctx.dtype, ctx.inp_shape = fp8, dtype, inp.shape
        ctx.requires_wgrad, ctx.grad_output_quantizer = weight.requires_grad, grad_output_quantizer
        ctx.weight_quantizer, ctx.is_fsdp2 = weight_quantizer, is_fsdp2
        ctx.reduce_and_update_bwd_fp8_tensors = False
        if fp8 and any(t.requires_grad for t in (inp, ln_weight, ln_bias, weight, bias)):
            ctx.reduce_and_update_bwd_fp8_tensors = _check_fp8_reduce_and_update()
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputmat, weightmat, saved_weight, _, ln_weight, ln_out, mu, rsigma = restore_from_func_ctx(ctx)
        dy, grad_bias = grad_output_preprocess(ctx.fp8, grad_outputs[0], True, ctx.grad_output_quantizer)
        weightmat = weight_for_dgrad(weightmat, saved_weight, ctx.weight_quantizer)
        dz = general_gemm(weightmat, dy, ctx.dtype, layout="NN")
        if getattr(ctx, "is_fsdp2", False) and isinstance(weightmat, QuantizedTensorStorage):
            clear_columnwise_cache(weightmat)
        wgrad = None
        if ctx.requires_wgrad:
            wgrad = general_gemm(ln_out, dy, ctx.dtype, layout="NT")
            clear_tensor_data(ln_out)
        dx, dln_weight, dln_bias = normalization_backward(dz, inputmat, mu, rsigma, ln_weight)
        clear_tensor_data(mu)
        clear_tensor_data(rsigma)
        if ctx.reduce_and_update_bwd_fp8_tensors:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx.view(ctx.inp_shape), dln_weight, dln_bias, wgrad, grad_bias, None


class LayerNormLinear(TransformerEngineBaseModule):
    """A layer norm with a linear module."""

    def __init__(self, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features))
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * 0.1)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, inp: Tensor) -> Tensor:
        is_grad_enabled = torch.is_grad_enabled()
        inp = self.prepare_forward(inp)
        try:
            quantizers: tuple[Any, ...] = (None, None, None)
            if self.fp8:
                forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
                quantizers = forward[0], forward[1], backward[0]
            arguments = {
                "fp8": self.fp8,
                "activation_dtype": self.activation_dtype,
                "is_grad_enabled": is_grad_enabled,
                "quantizers": quantizers,
                "is_fsdp2": self.is_fsdp2,
            }
            run = _LayerNormLinear.apply if is_grad_enabled else lambda *args: _LayerNormLinear.forward(None, *args)
            return run(inp, self.layer_norm_weight, self.layer_norm_bias, self.weight, self.bias, arguments)
        finally:
            self.end_forward()
