"""Bytes of values that are compressed in blocks with a scale each."""

from __future__ import annotations

from typing import Final, Literal

SwapPrecision = Literal["exact", "fp8"]
"""How activations leave the device: as they are, or with 8 bits (`lightning_memo.engine.memory.compressed_values`)."""

BLOCK: Final = 128
"""Number of values with one scale."""

SCALE_BYTES: Final = 2
"""A power of two in bf16, which has the exponents of fp32."""

WIDE_SCALE_BYTES: Final = 8
"""A power of two for values in fp64."""


def block_bytes(values: int, bits: int, scale_bytes: int) -> int:
    """Return the bytes of some values in blocks, the last one filled up.

    Args:
        values: Number of values.
        bits: Bits of a value.
        scale_bytes: Bytes of a scale.
    """
    return -(-values // BLOCK) * (BLOCK * bits // 8 + scale_bytes)


def compressed_bytes(values: int, value_bytes: int) -> int:
    """Return the bytes that some floating-point values have with `swap_precision="fp8"`.

    Args:
        values: Number of values.
        value_bytes: Bytes of a value that is not compressed.
    """
    return block_bytes(values, 8, WIDE_SCALE_BYTES if value_bytes > 4 else SCALE_BYTES)
