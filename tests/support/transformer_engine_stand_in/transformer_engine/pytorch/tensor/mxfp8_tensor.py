"""FP8 tensors with a power of two for each 32 values, of rows and, quantized apart, of columns."""

from __future__ import annotations

import torch
from torch import Tensor
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer, allocated, kernel

_BLOCK = 32
_BIAS = 127  # of exponents of 8 bits


class MXFP8TensorStorage(QuantizedTensorStorage):
    """Bytes `[rows, columns]` twice, each with its exponents."""

    def __init__(self, rowwise: list[Tensor | None], columnwise: list[Tensor | None], fp8_dtype: torch.dtype) -> None:
        self._rowwise_data, self._rowwise_scale_inv = rowwise
        self._columnwise_data, self._columnwise_scale_inv = columnwise
        self._fp8_dtype = fp8_dtype

    def clear(self) -> None:
        for t in (self._rowwise_data, self._columnwise_data, self._rowwise_scale_inv, self._columnwise_scale_inv):
            if t is not None:
                t.data = torch.empty(0, dtype=t.dtype, device=t.device)

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensorStorage]:
        tensors = [self._rowwise_data, self._columnwise_data, self._rowwise_scale_inv, self._columnwise_scale_inv]
        self._rowwise_data = self._columnwise_data = self._rowwise_scale_inv = self._columnwise_scale_inv = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        self._rowwise_data, self._columnwise_data, self._rowwise_scale_inv, self._columnwise_scale_inv = tensors[:4]
        return tensors[4:]

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        rowwise = self._rowwise_data is not None if rowwise_usage is None else rowwise_usage
        columnwise = self._columnwise_data is not None if columnwise_usage is None else columnwise_usage
        if rowwise and self._rowwise_data is None:
            raise RuntimeError("Requested row-wise usage, but MXFP8Tensor is missing row-scaled FP8 data")
        if columnwise and self._columnwise_data is None:
            raise RuntimeError("Requested column-wise usage, but MXFP8Tensor is missing column-scaled FP8 data")
        if not rowwise:
            self._rowwise_data = self._rowwise_scale_inv = None
        if not columnwise:
            self._columnwise_data = self._columnwise_scale_inv = None

    def rowwise(self) -> Tensor:
        """Return the values as a product reads them by rows."""
        assert self._rowwise_data is not None and self._rowwise_scale_inv is not None
        return _values(self._rowwise_data, self._rowwise_scale_inv, self._fp8_dtype, 1)

    def columnwise(self) -> Tensor:
        """Return the values as a product reads them by columns."""
        assert self._columnwise_data is not None and self._columnwise_scale_inv is not None
        return _values(self._columnwise_data, self._columnwise_scale_inv, self._fp8_dtype, 0)


class MXFP8Quantizer(Quantizer):
    """Scales each block of 32 values, or of 32 x 32, by the power of two with which its largest one fits."""

    def __init__(self, fp8_dtype: torch.dtype, *, with_2d_quantization: bool = False) -> None:
        super().__init__()
        self.dtype, self.with_2d_quantization = fp8_dtype, with_2d_quantization

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        with kernel():
            rows = tensor.reshape(-1, tensor.shape[-1]).float()
            rowwise = self._quantized(rows, 1) if self.rowwise_usage else None
            columnwise = self._quantized(rows, 0) if self.columnwise_usage else None
        return MXFP8TensorStorage(_allocated(rowwise), _allocated(columnwise), self.dtype)

    def _quantized(self, rows: Tensor, dim: int) -> list[Tensor]:
        assert rows.shape[dim] % _BLOCK == 0, f"{rows.shape[dim]} values are no multiple of {_BLOCK}"
        most = torch.finfo(self.dtype).max
        amax = rows.unflatten(dim, (-1, _BLOCK)).abs().amax(dim + 1)
        if self.with_2d_quantization:
            amax = amax.unflatten(1 - dim, (-1, _BLOCK)).amax(2 - dim).repeat_interleave(_BLOCK, 1 - dim)
        exponents = torch.where(amax > 0, (amax / most).log2().ceil(), torch.full_like(amax, -_BIAS))
        exponents = exponents.clamp(-_BIAS, _BIAS)
        scaled = (rows * torch.exp2(-exponents).repeat_interleave(_BLOCK, dim)).clamp(-most, most)
        return [scaled.to(self.dtype).view(torch.uint8), (exponents + _BIAS).to(torch.uint8)]


def _allocated(parts: list[Tensor] | None) -> list[Tensor | None]:
    return [None, None] if parts is None else [allocated(part) for part in parts]


def _values(data: Tensor, exponents: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    scale_inv = torch.exp2(exponents.float() - _BIAS).repeat_interleave(_BLOCK, dim)
    return data.view(dtype).float() * scale_inv
