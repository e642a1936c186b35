"""Argument types that several benchmarks use."""

from __future__ import annotations

import argparse
import re

_MULTIPLES = {"K": 1024, "M": 1024**2}


def token_count(text: str) -> int:
    """Parses a length like 65536, 64K or 1M.

    Raises:
        argparse.ArgumentTypeError: The text is not a length.
    """
    digits, multiple = (text[:-1], _MULTIPLES[text[-1].upper()]) if text[-1:].upper() in _MULTIPLES else (text, 1)
    if not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: give one like 65536, 64K or 1M")
    return int(digits) * multiple


def positive(text: str) -> int:
    """Parses an integer of at least 1.

    Raises:
        argparse.ArgumentTypeError: The integer is smaller, or the text is not an integer.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def file_name(device: str) -> str:
    """Returns the name of a device in a form that is valid in paths."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
