"""Runs operations, one after another, as one function of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.ops.op import BasicOperation, OperationContext
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import prepare_for_saving, restore_from_func_ctx


class _OperationFuserAutogradFunction(torch.autograd.Function):
    @staticmethod
    def forward(func_ctx: Any, input_: Tensor, fuser: OperationFuser, set_output_requires_grad: bool, *params: Tensor):
        basic_op_ctxs = [OperationContext() for _ in fuser._basic_ops]
        for tensor in (input_, *params):
            tensor._do_not_clear = True  # type: ignore[attr-defined]
        x = input_
        for idx, (op, ctx) in enumerate(zip(fuser._basic_ops, basic_op_ctxs, strict=True)):
            ctx.requires_grad = idx >= fuser.first_op_requiring_backward
            x = op.op_forward(ctx, x)
        if func_ctx is not None:
            to_save: list[Tensor] = []
            for ctx in basic_op_ctxs:
                start = len(to_save)
                to_save.extend(ctx.to_save or ())
                ctx.to_save, ctx._saved_tensors_range = None, (start, len(to_save))
            tensors_to_save, tensor_objects = prepare_for_saving(*to_save)
            func_ctx.save_for_backward(*tensors_to_save)
            func_ctx.tensor_objects = tensor_objects
            is_first_module = False
            if fuser.first_op_requiring_backward < len(fuser._basic_ops):
                is_first_module = FP8GlobalStateManager.is_first_fp8_module()
            func_ctx.basic_ops, func_ctx.basic_op_ctxs = fuser._basic_ops, basic_op_ctxs
            func_ctx.is_first_module = is_first_module
        x._do_not_clear = True  # type: ignore[attr-defined]
        if set_output_requires_grad:
            x.requires_grad_(fuser.first_op_requiring_backward < len(fuser._basic_ops))
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(func_ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        saved_tensors = restore_from_func_ctx(func_ctx)
        for ctx in func_ctx.basic_op_ctxs:
            ctx.saved_tensors = saved_tensors[slice(*ctx._saved_tensors_range)]
            ctx._saved_tensors_range = None
        dx: Tensor | None = grad_output
        grad_params: list[Tensor | None] = []
        for op, ctx in zip(reversed(func_ctx.basic_ops), reversed(func_ctx.basic_op_ctxs), strict=True):
            if not ctx.requires_grad:
                dx, grad_params = None, [None] * len(list(op.parameters())) + grad_params
                continue
            dx, of_params = op.op_backward(ctx, dx)
            grad_params, ctx.saved_tensors = [*of_params, *grad_params], None
        if func_ctx.is_first_module:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, None, None, *grad_params


class OperationFuser:
    """Runs operations as one function. `BasicOperation.forward` makes a new one for each call."""

    def __init__(self, ops: list[BasicOperation]) -> None:
        self._basic_ops = ops
        self.recipe_type: type | None = None
        self.first_op_requiring_backward = 0
        for op in ops:
            op._lock_extra_tensor_channels()
        self._flat_basic_op_params = [p for op in ops for p in op.parameters()]

    def maybe_fuse_ops(self, is_grad_enabled: bool, recipe: Recipe | None, input_: Tensor) -> None:
        number = len(self._basic_ops)
        needs = [idx for idx, op in enumerate(self._basic_ops) if any(p.requires_grad for p in op.parameters())]
        first = 0 if input_.requires_grad else min(needs, default=number)
        self.first_op_requiring_backward = first if is_grad_enabled else number
        if self.recipe_type is type(recipe):
            return
        for op in self._basic_ops:
            op.reset_recipe_state(recipe=recipe)
        self.recipe_type = type(recipe)

    def __call__(self, input: Tensor) -> Tensor:
        recipe = None
        if FP8GlobalStateManager.is_fp8_enabled():
            recipe = FP8GlobalStateManager.get_fp8_recipe()
        is_grad_enabled = torch.is_grad_enabled()
        self.maybe_fuse_ops(is_grad_enabled, recipe, input)
        args = (input, self, is_grad_enabled, *self._flat_basic_op_params)
        if not is_grad_enabled:
            return _OperationFuserAutogradFunction.forward(None, *args)
        return _OperationFuserAutogradFunction.apply(*args)
