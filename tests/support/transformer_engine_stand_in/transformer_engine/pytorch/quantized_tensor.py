"""What quantized tensors have in common, and how functions save them for the backward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class QuantizedTensorStorage:
    """A quantized tensor that autograd does not see. It holds plain tensors of bytes and scales."""

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        raise NotImplementedError

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensorStorage]:
        raise NotImplementedError

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError


def prepare_for_saving(*tensors: Any) -> tuple[list[Tensor | None], list[QuantizedTensorStorage | None]]:
    """Take quantized tensors apart. Their objects keep none of the parts."""
    parts: list[Tensor | None] = []
    objects: list[QuantizedTensorStorage | None] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, Tensor):
            parts.append(tensor)
            objects.append(None)
        else:
            of_this, holder = tensor.prepare_for_saving()
            parts.extend(of_this)
            objects.append(holder)
    return parts, objects


def restore_from_saved(tensors: list[Any], saved_tensors: Any) -> list[Any]:
    """Put the saved parts into the objects."""
    found: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            found.append(saved_tensors[0])
            saved_tensors = saved_tensors[1:]
        else:
            saved_tensors = tensor.restore_from_saved(saved_tensors)
            found.append(tensor)
    return found


def restore_from_func_ctx(ctx: Any) -> list[Any]:
    """Return what a function has saved, and let its objects go."""
    if not hasattr(ctx, "tensor_objects") or ctx.tensor_objects is None:
        raise AttributeError("ctx must have .tensor_objects to restore saved tensors")
    found = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
    ctx.tensor_objects = None
    return found


def clear_tensor_data(*tensors: Any) -> None:
    """Free tensors that nobody needs any more (`pytorch/utils.py`)."""
    for t in tensors:
        if isinstance(t, QuantizedTensorStorage):
            t.clear()
        elif t is not None and not hasattr(t, "_do_not_clear"):
            t.data = torch.empty(0, dtype=t.dtype, device=t.device)


def kernel() -> contextlib.AbstractContextManager[Any]:
    """Compute inside as kernels do, which are no operators of PyTorch: no mode sees what they read and write."""
    return _disable_current_modes()


def written(t: Tensor, value: Tensor) -> None:
    """Write into a tensor as kernels do, which nobody counts and which inference mode does not keep from it."""
    with kernel(), torch.inference_mode():
        t.data.copy_(value)


def allocated(t: Tensor) -> Tensor:
    """Return the result of a kernel in memory that PyTorch has allocated for it."""
    made = torch.empty_like(t)
    written(made, t)
    return made


class Quantizer:
    """Makes quantized tensors."""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        raise NotImplementedError

    def __call__(self, tensor: Tensor) -> QuantizedTensorStorage:
        with torch.no_grad():
            return self.quantize_impl(tensor)
