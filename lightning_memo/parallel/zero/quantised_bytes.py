"""Bytes of values that are sent as integers in blocks with a scale each."""

from __future__ import annotations

from typing import Final

from lightning_memo.artifacts.slot_layouts import block_bytes

SCALE_BYTES: Final = 4

WEIGHT_BITS: Final = 8

GRADIENT_BITS: Final = {"int8": 8, "int4": 4}
"""Bits of a gradient by `zero_communication`."""


def sent_bytes(values: int, bits: int) -> int:
    """Return the bytes in which some values are sent."""
    return block_bytes(values, bits, SCALE_BYTES)
