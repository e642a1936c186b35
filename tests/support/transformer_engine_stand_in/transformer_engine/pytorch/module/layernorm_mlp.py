"""A layer norm with an MLP of two products, whose FP8 state is that of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    assert_dim_for_fp8_exec,
    cast_if_needed,
    general_gemm,
    grad_output_preprocess,
    quantize_weight,
    weight_for_dgrad,
)
from transformer_engine.pytorch.module.layernorm_linear import apply_normalization, normalization_backward
from transformer_engine.pytorch.module.linear import _check_fp8_reduce_and_update
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensorStorage,
    clear_tensor_data,
    prepare_for_saving,
    restore_from_func_ctx,
)
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.utils import clear_columnwise_cache


def _weight(weight: Tensor, quantizer: Any, dtype: Any, columnwise: bool) -> Any:
    if quantizer is None:
        return cast_if_needed(weight, dtype)
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    found = quantize_weight(tensor=weight, quantizer=quantizer, workspaces={}, name=None)
    found.update_usage(rowwise_usage=True)
    return found


def _activated(weight: Any, ln_out: Any, bias: Tensor, quantizer: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Return the input of the activation with or without its bias, as it is saved, and the result.

    In high precision, the bias is added by the kernel of the activation (`bias_gelu_fusion`).
    """
    if quantizer is None:
        without_bias = general_gemm(weight, ln_out, dtype)
        return None, without_bias, F.gelu(without_bias + bias.to(dtype), approximate="tanh")
    fc1_out = general_gemm(weight, ln_out, dtype, bias=bias)
    return fc1_out, None, quantizer(F.gelu(fc1_out, approximate="tanh"))


class _LayerNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, *rest: Any) -> Tensor:
        ln_weight, ln_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, args = rest
        fp8, dtype, is_grad_enabled = args["fp8"], args["activation_dtype"], args["is_grad_enabled"]
        fsdp2_skip_columnwise = args["is_fsdp2"]  # there is no recomputation of its own
        columnwise = is_grad_enabled and not fsdp2_skip_columnwise
        fc1_input, fc1_weights, fc2_input, fc2_weights, fc1_grad, fc2_grad = args["quantizers"]
        inputmat = cast_if_needed(inp.view(-1, inp.shape[-1]), dtype)
        if fp8:
            assert_dim_for_fp8_exec(inputmat, fc1_weight, fc2_weight)
            fc1_input.set_usage(rowwise=True, columnwise=is_grad_enabled and fc1_weight.requires_grad)
            by_columns = isinstance(fc2_input, (MXFP8Quantizer, Float8BlockQuantizer))
            fc2_input.set_usage(rowwise=True, columnwise=by_columns)
        ln_out, mu, rsigma = apply_normalization(inputmat, ln_weight, ln_bias, fc1_input)
        fc1_weight_final = _weight(fc1_weight, fc1_weights, dtype, columnwise)
        fc2_weight_final = _weight(fc2_weight, fc2_weights, dtype, columnwise)
        fc1_out, fc1_out_without_bias, act_out = _activated(fc1_weight_final, ln_out, fc1_bias, fc2_input, dtype)
        out = general_gemm(fc2_weight_final, act_out, dtype, bias=fc2_bias).view(inp.shape)
        if not is_grad_enabled:
            return out
        fc1_wt_save, fc2_wt_save = fc1_weight_final, fc2_weight_final
        if fsdp2_skip_columnwise:
            fc1_wt_save = fc1_wt_save if fc1_wt_save is fc1_weight else None
            fc2_wt_save = fc2_wt_save if fc2_wt_save is fc2_weight else None
        ln_out, act_out = (t if w.requires_grad else None for t, w in ((ln_out, fc1_weight), (act_out, fc2_weight)))
        tensors_to_save, tensor_objects = prepare_for_saving(
            inputmat, ln_weight, ln_out, fc1_wt_save, fc1_weight, fc1_bias, fc1_out, fc1_out_without_bias, act_out,
            fc2_wt_save, fc2_weight, fc2_bias, mu, rsigma,
        )  # fmt: skip
        ctx.save_for_backward(*tensors_to_save)
        ctx.tensor_objects = tensor_objects
        ctx.fp8, ctx.dtype, ctx.inp_shape, ctx.grad_quantizers = fp8, dtype, inp.shape, (fc1_grad, fc2_grad)
        ctx.weight_quantizers, ctx.is_fsdp2 = (fc1_weights, fc2_weights), args["is_fsdp2"]
        ctx.reduce_and_update_bwd_fp8_tensors = False
        if fp8 and any(t.requires_grad for t in (inp, *rest[:-1])):
            ctx.reduce_and_update_bwd_fp8_tensors = _check_fp8_reduce_and_update()
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (
            inputmat, ln_weight, ln_out, fc1_weight, origin_fc1_weight, fc1_bias, fc1_out, fc1_out_without_bias,
            act_out, fc2_weight, origin_fc2_weight, _, mu, rsigma,
        ) = restore_from_func_ctx(ctx)  # fmt: skip
        dy, dfc2_bias = grad_output_preprocess(ctx.fp8, grad_output, True, ctx.grad_quantizers[1])
        fc2_weight = weight_for_dgrad(fc2_weight, origin_fc2_weight, ctx.weight_quantizers[1])
        dact = general_gemm(fc2_weight, dy, ctx.dtype, layout="NN")
        if getattr(ctx, "is_fsdp2", False) and isinstance(fc2_weight, QuantizedTensorStorage):
            clear_columnwise_cache(fc2_weight)
        dfc1 = dfc2 = None
        if act_out is not None:
            if ctx.fp8:
                act_out.update_usage(columnwise_usage=True)
            dfc2 = general_gemm(act_out, dy, ctx.dtype, layout="NT")
            clear_tensor_data(act_out)
        inner = fc1_out if fc1_out_without_bias is None else fc1_out_without_bias + fc1_bias.to(ctx.dtype)
        dfc1_out = torch.ops.aten.gelu_backward(dact, inner, approximate="tanh")
        clear_tensor_data(fc1_out, fc1_out_without_bias)
        dz, dfc1_bias = grad_output_preprocess(ctx.fp8, dfc1_out, True, ctx.grad_quantizers[0])
        fc1_weight = weight_for_dgrad(fc1_weight, origin_fc1_weight, ctx.weight_quantizers[0])
        dln = general_gemm(fc1_weight, dz, ctx.dtype, layout="NN")
        if getattr(ctx, "is_fsdp2", False) and isinstance(fc1_weight, QuantizedTensorStorage):
            clear_columnwise_cache(fc1_weight)
        if ln_out is not None:
            dfc1 = general_gemm(ln_out, dz, ctx.dtype, layout="NT")
            clear_tensor_data(ln_out)
        dx, dln_weight, dln_bias = normalization_backward(dln, inputmat, mu, rsigma, ln_weight)
        clear_tensor_data(mu, rsigma)
        if ctx.reduce_and_update_bwd_fp8_tensors:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx.view(ctx.inp_shape), dln_weight, dln_bias, dfc1, dfc1_bias, dfc2, dfc2_bias, None


class LayerNormMLP(TransformerEngineBaseModule):
    """A layer norm with an MLP."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, checkpoint: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.checkpoint = checkpoint
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden_size))
        self.layer_norm_bias = nn.Parameter(torch.zeros(hidden_size))
        self.fc1_weight = nn.Parameter(torch.randn(ffn_hidden_size, hidden_size) * 0.1)
        self.fc1_bias = nn.Parameter(torch.zeros(ffn_hidden_size))
        self.fc2_weight = nn.Parameter(torch.randn(hidden_size, ffn_hidden_size) * 0.1)
        self.fc2_bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, inp: Tensor) -> Tensor:
        is_grad_enabled = torch.is_grad_enabled()
        inp = self.prepare_forward(inp, num_gemms=2)
        try:
            quantizers: tuple[Any, ...] = (None,) * 6
            if self.fp8:
                forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
                quantizers = forward[0], forward[1], forward[3], forward[4], backward[0], backward[2]
            arguments = {
                "fp8": self.fp8,
                "activation_dtype": self.activation_dtype,
                "is_grad_enabled": is_grad_enabled,
                "quantizers": quantizers,
                "is_fsdp2": self.is_fsdp2,
            }
            run = _LayerNormMLP.apply if is_grad_enabled else lambda *args: _LayerNormMLP.forward(None, *args)
            return run(
                inp, self.layer_norm_weight, self.layer_norm_bias, self.fc1_weight, self.fc1_bias, self.fc2_weight,
                self.fc2_bias, arguments,
            )  # fmt: skip
        finally:
            self.end_forward()
