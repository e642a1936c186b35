"""Values in 8 bits, in blocks with a scale each: the form in which a slot holds tensors with `swap_precision="fp8"`.

Note: [Error of a compressed value]
The scale of a block of 128 values is the power of two at which its largest magnitude a becomes a number from 128 to 256
(not included). Divided by it, each value is rounded to e4m3, which has 3 bits behind the point and steps of 2^-9 below
2^-6. Scales are powers of two, so rounding to e4m3 is the only error:

- A value arrives within 1/17 of its magnitude, or within 2^-17 a if that is more.
- Values with at most four significant bits stay what they are, such as zeros and ones.
- A block with a NaN or an infinity arrives as NaN, all of it.
- Blocks whose largest magnitude is below 2^-119 have the scale 2^-126: their error is at most 2^-136.
- A magnitude within 4 % of the largest number of bf16, fp32 or fp64 may arrive as infinity. In fp16, it arrives as the
  largest number.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from lightning_memo.artifacts.slot_layouts import BLOCK
from lightning_memo.parallel.zero_sharding import value_blocks

_BLOCKS_AT_ONCE: Final = 2**24 // BLOCK
"""Blocks that are compressed in one pass, for which a CPU needs memory for as many values in fp32."""

_LARGEST: Final = 2.0**7  # of a block, without the bits behind its point
_LEAST_SCALE: Final = 2.0**-126  # the smallest power of two that is a normal number of fp32
_MOST_HALF: Final = torch.finfo(torch.float16).max
# Magnitudes as integers: the bits of the exponent are those of the next smaller power of two, and of infinity for NaN.
_EXPONENTS: Final = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


class CompressedValues:
    """Floating-point values in 8 bits.

    Args:
        memory: Bytes, uint8 `[compressed_bytes(values, dtype.itemsize)]`: the values of all blocks in e4m3, and then
            the scales, in bf16, or in fp64 for values in fp64.
        values: Number of values.
        dtype: Their data type: fp16, bf16, fp32 or fp64.
    """

    def __init__(self, memory: Tensor, values: int, dtype: torch.dtype) -> None:
        self._values, self._dtype = values, dtype
        blocks = -(-values // BLOCK)
        codes, scales = memory.split([blocks * BLOCK, len(memory) - blocks * BLOCK])
        self._codes = codes.view(torch.float8_e4m3fn).view(blocks, BLOCK)
        self._scales = scales.view(torch.float64 if dtype == torch.float64 else torch.bfloat16)[:, None]

    def write(self, t: Tensor) -> None:
        """Compress values, `[values]`."""
        first = 0
        for rows in value_blocks(t):
            for part in rows.split(_BLOCKS_AT_ONCE):
                place = slice(first, first + len(part))
                scales = _scales_of(part)
                self._scales[place] = scales
                torch.div(part, scales, out=self._codes[place])  # in one pass
                first += len(part)

    def read(self) -> Tensor:
        """Return the values, `[values]`."""
        t = torch.empty(self._codes.shape, dtype=self._dtype, device=self._codes.device)
        t.copy_(self._codes).mul_(self._scales)
        if self._dtype == torch.float16:
            t.clamp_(-_MOST_HALF, _MOST_HALF)  # a value may have been rounded up
        return t.view(-1)[: self._values]


def _scales_of(part: Tensor) -> Tensor:
    """Return the scale of each block, `[blocks, 1]`: infinity for one with a value that is not finite."""
    wide = torch.float64 if part.dtype == torch.float64 else torch.float32
    largest = torch.linalg.vector_norm(part, math.inf, 1, keepdim=True, dtype=wide)
    integers, exponents = _EXPONENTS[wide]
    powers = (largest.view(integers) & exponents).view(wide)
    return (powers / _LARGEST).clamp_min_(_LEAST_SCALE)
