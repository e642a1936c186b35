"""Bytes of values that are sent as integers in blocks with a scale each."""

from __future__ import annotations

from typing import Final

BLOCK: Final = 128
"""Number of values with one scale."""

SCALE_BYTES: Final = 4

WEIGHT_BITS: Final = 8

GRADIENT_BITS: Final = {"int8": 8, "int4": 4}
"""Bits of a gradient by `zero_communication`."""


def sent_bytes(values: int, bits: int) -> int:
    """Return the bytes in which some values are sent."""
    return -(-values // BLOCK) * (BLOCK * bits // 8 + SCALE_BYTES)
