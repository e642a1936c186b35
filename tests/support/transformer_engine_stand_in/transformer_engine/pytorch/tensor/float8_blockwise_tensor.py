"""FP8 tensors with a scale for each block of 128 values, or of 128 x 128, quantized apart for rows and columns."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer, allocated, kernel, written

_BLOCK = 128
Parts = tuple[Tensor | None, Tensor | None]


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """Bytes `[rows, columns]` and, transposed, `[columns, rows]`, each with the inverses of its scales."""

    def __init__(self, rowwise: Parts, columnwise: Parts, fp8_dtype: torch.dtype, is_2D_scaled: bool) -> None:
        self._rowwise_data, self._rowwise_scale_inv = rowwise
        self._columnwise_data, self._columnwise_scale_inv = columnwise
        self._fp8_dtype, self._is_2D_scaled = fp8_dtype, is_2D_scaled

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
        assert rowwise or columnwise, "Must retain some data either columnwise or rowwise"
        assert not rowwise or self._rowwise_data is not None, "Cannot update to rowwise usage."
        assert not columnwise or self._columnwise_data is not None, "Cannot update to columnwise usage."
        if not rowwise:
            self._rowwise_data = self._rowwise_scale_inv = None
        if not columnwise:
            self._columnwise_data = self._columnwise_scale_inv = None

    def rowwise(self) -> Tensor:
        """Return the values as a product reads them by rows."""
        assert self._rowwise_data is not None and self._rowwise_scale_inv is not None
        return self._values(self._rowwise_data, self._rowwise_scale_inv)

    def columnwise(self) -> Tensor:
        """Return the values as a product reads them by columns."""
        assert self._columnwise_data is not None and self._columnwise_scale_inv is not None
        return self._values(self._columnwise_data, self._columnwise_scale_inv).t()

    def _values(self, data: Tensor, scale_inv: Tensor) -> Tensor:
        if self._is_2D_scaled:
            blocks = scale_inv.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        else:
            blocks = scale_inv.t().repeat_interleave(_BLOCK, 1)
        return data.view(self._fp8_dtype).float() * blocks[: data.shape[0], : data.shape[1]]


class Float8BlockQuantizer(Quantizer):
    """Scales each block by a power of two, so that its largest value fits."""

    def __init__(self, fp8_dtype: torch.dtype, *, block_scaling_dim: int) -> None:
        super().__init__()
        self.dtype, self.block_scaling_dim = fp8_dtype, block_scaling_dim

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        with kernel():
            rows = tensor.reshape(-1, tensor.shape[-1]).float()
            rowwise: Parts = self._quantized(rows) if self.rowwise_usage else (None, None)
            columnwise: Parts = self._quantized(rows.t().contiguous()) if self.columnwise_usage else (None, None)
        return Float8BlockwiseQTensorStorage(rowwise, columnwise, self.dtype, self.block_scaling_dim == 2)

    def _quantized(self, rows: Tensor) -> Parts:
        """Return the bytes and inverse scales; those of single rows are transposed."""
        most, tall = torch.finfo(self.dtype).max, _BLOCK if self.block_scaling_dim == 2 else 1
        padded = F.pad(rows, (0, -rows.shape[1] % _BLOCK, 0, -rows.shape[0] % tall))
        amax = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, tall)).abs().amax((1, 3))
        scale = torch.where(amax > 0, most / amax, torch.ones_like(amax))
        scale = (scale.view(torch.int32) & -(2**23)).view(torch.float32)
        blocks = scale.repeat_interleave(tall, 0).repeat_interleave(_BLOCK, 1)[: rows.shape[0], : rows.shape[1]]
        data = (rows * blocks).clamp(-most, most).to(self.dtype).view(torch.uint8)
        return allocated(data), _padded(1 / scale if tall > 1 else (1 / scale).t())


_OTHERS = itertools.count(1.0)


def _padded(scale_inv: Tensor) -> Tensor:
    """Return scales with the columns that products need. Kernels leave in these what the memory had before."""
    shape = scale_inv.shape[0], scale_inv.shape[1] + -scale_inv.shape[1] % 4
    found = allocated(torch.full(shape, next(_OTHERS), device=scale_inv.device))
    written(found[:, : scale_inv.shape[1]], scale_inv)
    return found
