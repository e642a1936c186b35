"""FP8 tensors with one scale. As on Hopper, products that need the transpose have a copy of the bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer, allocated, kernel, written


class Float8TensorStorage(QuantizedTensorStorage):
    """Bytes `[rows, columns]`, their transpose, and the inverse of the scale."""

    def __init__(self, data: Tensor | None, fp8_scale_inv: Tensor, fp8_dtype: torch.dtype, columnwise: bool) -> None:
        self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        self._transpose: Tensor | None = None
        if columnwise:
            self._create_transpose()

    def _create_transpose(self) -> None:
        assert self._data is not None
        self._transpose = self._data.t().contiguous()

    def clear(self) -> None:
        for t in (self._data, self._transpose):
            if t is not None:
                t.data = torch.empty(0, dtype=t.dtype, device=t.device)

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensorStorage]:
        tensors: list[Tensor | None] = [self._data, self._transpose, self._scale_inv]
        self._data = self._transpose = self._scale_inv = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        self._data, self._transpose, self._scale_inv = tensors[:3]
        return tensors[3:]

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        has = self._data is not None, self._transpose is not None
        needs = (
            has[0] if rowwise_usage is None else rowwise_usage,
            has[1] if columnwise_usage is None else columnwise_usage,
        )
        if needs[0] and not has[0]:
            raise RuntimeError("Cannot generate FP8 data, even from FP8 data transpose")
        if needs[1] and not has[1]:
            if not has[0]:
                raise RuntimeError("FP8 data is required to generate FP8 data transpose")
            self._create_transpose()
        self._data = self._data if needs[0] else None
        self._transpose = self._transpose if needs[1] else None

    def rowwise(self) -> Tensor:
        """Return the values as a product reads them by rows."""
        assert self._data is not None
        return self._data.view(self._fp8_dtype).float() * self._scale_inv

    def columnwise(self) -> Tensor:
        """Return the values as a product reads them by columns."""
        assert self._transpose is not None
        return self._transpose.t().view(self._fp8_dtype).float() * self._scale_inv


def _cast(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of `[rows, columns]`, saturated, as conversions on a GPU are."""
    most = torch.finfo(dtype).max
    scaled = (tensor.reshape(-1, tensor.shape[-1]).float() * scale).clamp(-most, most)
    return scaled.to(dtype).view(torch.uint8)


class Float8Quantizer(Quantizer):
    """Scales as its module says, and keeps the largest absolute value: the kernels take the maximum with what is there.

    `common/cast/fp8/quantize_fp8.cuh` and others end with `atomicMaxFloat(amax_ptr, amax)`.
    """

    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        with kernel():
            written(self.amax, torch.maximum(self.amax, tensor.abs().max().float()))
            data, scale_inv = _cast(tensor, self.scale, self.dtype), 1 / self.scale.reshape(1)
        return Float8TensorStorage(allocated(data), allocated(scale_inv), self.dtype, self.columnwise_usage)


class Float8CurrentScalingQuantizer(Quantizer):
    """Scales by the largest absolute value of the tensor."""

    def __init__(self, fp8_dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = fp8_dtype

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        with kernel():
            amax = tensor.abs().max().float().reshape(1)
            scale = torch.where(amax > 0, torch.finfo(self.dtype).max / amax, torch.ones_like(amax))
            data = _cast(tensor, scale, self.dtype)
        return Float8TensorStorage(allocated(data), allocated(1 / scale), self.dtype, self.columnwise_usage)
