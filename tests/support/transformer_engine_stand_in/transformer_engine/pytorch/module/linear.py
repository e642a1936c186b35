"""A linear module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.distributed import (
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    assert_dim_for_fp8_exec,
    cast_if_needed,
    general_gemm,
    grad_output_preprocess,
    quantize_weight,
    weight_for_dgrad,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensorStorage,
    clear_tensor_data,
    prepare_for_saving,
    restore_from_func_ctx,
)
from transformer_engine.pytorch.tensor.utils import clear_columnwise_cache


def _check_fp8_reduce_and_update() -> bool:
    """Return whether this is the first module of an autocast, whose backward ends those of all."""
    state = FP8GlobalStateManager.quantization_state
    before = state.is_first_fp8_module
    first = FP8GlobalStateManager.is_first_fp8_module()
    if in_fp8_activation_recompute_phase():
        state.is_first_fp8_module = before
    return first


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, inp: Tensor, bias: Tensor | None, args: dict[str, Any]) -> Tensor:
        fp8, dtype, is_grad_enabled = args["fp8"], args["activation_dtype"], args["is_grad_enabled"]
        is_fsdp2 = args["is_fsdp2"]
        input_quantizer, weight_quantizer, grad_output_quantizer = args["quantizers"]
        backward_needs_input = is_grad_enabled and weight.requires_grad
        inputmat: Any = inp
        if fp8:
            assert_dim_for_fp8_exec(inp, weight)
            input_quantizer.set_usage(rowwise=True, columnwise=backward_needs_input)
            inputmat = input_quantizer(inp)
            columnwise_usage = is_grad_enabled and inp.requires_grad and not is_fsdp2
            if not columnwise_usage:
                columnwise_usage = is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()
            weight_quantizer.set_usage(rowwise=True, columnwise=columnwise_usage)
            weightmat: Any = quantize_weight(
                tensor=weight, quantizer=weight_quantizer, workspaces=args["workspaces"], name=args["cache_name"]
            )
            weightmat.update_usage(rowwise_usage=True)
        else:
            inputmat = cast_if_needed(inp.reshape(-1, inp.shape[-1]), dtype)
            weightmat = cast_if_needed(weight, dtype)
        out = general_gemm(weightmat, inputmat, dtype, bias=bias).view(*inp.shape[:-1], weight.shape[0])
        if not is_grad_enabled:
            return out
        if fp8 and backward_needs_input:
            inputmat.update_usage(rowwise_usage=False, columnwise_usage=True)
        saved_inputmat, wt_save = inputmat if backward_needs_input else None, weightmat
        if is_fsdp2 and weightmat is not weight:
            wt_save = None
        saved_weight, saved_bias = weight, bias
        tensors_to_save, tensor_objects = prepare_for_saving(saved_inputmat, wt_save, saved_weight, saved_bias)
        ctx.save_for_backward(*tensors_to_save)
        ctx.tensor_objects = tensor_objects
        ctx.fp8, ctx.dtype, ctx.inp_shape, ctx.use_bias = fp8, dtype, inp.shape, bias is not None
        ctx.requires_dgrad, ctx.requires_wgrad = inp.requires_grad, weight.requires_grad
        ctx.grad_output_quantizer, ctx.owns_input = grad_output_quantizer, inputmat is not inp
        ctx.weight_quantizer, ctx.is_fsdp2 = weight_quantizer, is_fsdp2
        ctx.reduce_and_update_bwd_fp8_tensors = False
        if fp8 and (inp.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
            ctx.reduce_and_update_bwd_fp8_tensors = _check_fp8_reduce_and_update()
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputmat, weightmat, saved_weight, _ = restore_from_func_ctx(ctx)
        dy, grad_bias = grad_output_preprocess(ctx.fp8, grad_output, ctx.use_bias, ctx.grad_output_quantizer)
        dgrad = wgrad = None
        if ctx.requires_dgrad:
            weightmat = weight_for_dgrad(weightmat, saved_weight, ctx.weight_quantizer)
            dgrad = general_gemm(weightmat, dy, ctx.dtype, layout="NN").view(ctx.inp_shape)
            if getattr(ctx, "is_fsdp2", False) and isinstance(weightmat, QuantizedTensorStorage):
                clear_columnwise_cache(weightmat)
        if ctx.requires_wgrad:
            if ctx.fp8:
                inputmat.update_usage(columnwise_usage=True)
                dy.update_usage(columnwise_usage=True)
            wgrad = general_gemm(inputmat, dy, ctx.dtype, layout="NT")
            if ctx.owns_input:
                clear_tensor_data(inputmat)
        if ctx.reduce_and_update_bwd_fp8_tensors:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return wgrad, dgrad, grad_bias, None


class Linear(TransformerEngineBaseModule):
    """A linear module."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * 0.1)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        is_grad_enabled = torch.is_grad_enabled()
        inp = self.prepare_forward(inp)
        try:
            arguments = {
                "fp8": self.fp8,
                "activation_dtype": self.activation_dtype,
                "is_grad_enabled": is_grad_enabled,
                "quantizers": self._get_quantizers(),
                "workspaces": self._fp8_workspaces,
                "cache_name": None if (is_first_microbatch is None or self.is_fsdp2) else "weight",
                "is_fsdp2": self.is_fsdp2,
            }
            run = _Linear.apply if is_grad_enabled else lambda *args: _Linear.forward(None, *args)
            return run(self.weight, inp, self.bias, arguments)
        finally:
            self.end_forward()

    def _get_quantizers(self) -> tuple[Any, Any, Any]:
        if not self.fp8:
            return None, None, None
        forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
        for quantizer in (forward[0], forward[1], backward[0]):
            quantizer.internal = True
        return forward[0], forward[1], backward[0]
