"""Reads and writes sizes, durations and numbers with units.

Pure: imports neither torch nor Lightning.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

MOST_TOKENS: Final = 2**30
"""Of a sequence; longer ones are neither asked nor tried."""

_LENGTH: Final = re.compile(r"\s*([0-9]{1,12})\s*([KkMm]?)\s*", re.ASCII)
_TIMES: Final = {"": 1, "k": 2**10, "m": 2**20}

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MULTIPLIERS: Final = {unit.lower(): 1024**power for power, unit in enumerate(_UNITS)} | {
    unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb", "pb"))
}
_SIZE: Final = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(size: str | int) -> int:
    """Read a size in bytes.

    Args:
        size: Bytes as an integer, or a number with a unit: "120GiB" (powers of 1024), "1.5GB" (powers of 1000).
            A number without a unit is bytes. Fractions of a byte are dropped.

    Returns:
        The size in bytes, at least 1.

    Raises:
        ValueError: `size` is not a size, or is less than one byte.
    """
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        multiplier = _MULTIPLIERS.get(match[2].lower() or "b")
        size_bytes = int(Decimal(match[1]) * multiplier) if multiplier else 0
    else:
        size_bytes = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if size_bytes < 1:
        raise ValueError(f'{size!r} is not a size: give bytes as a positive integer, or text like "120GiB" or "1.5GB"')
    return size_bytes


def format_bytes(size_bytes: float) -> str:
    """Write a size for people, in the largest unit in which it is at least 1, with one decimal ("1.2 GiB").

    Args:
        size_bytes: Size in bytes.
    """
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    power = 0
    # 1023.95 would be printed as 1024.0 of the smaller unit.
    while abs(size_bytes) >= 1023.95 and power < len(_UNITS) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.1f} {_UNITS[power]}"


def format_setting(size_bytes: int) -> str:
    """Write a size as a setting, exactly ("192GiB").

    Args:
        size_bytes: Size in bytes.
    """
    for unit in ("TiB", "GiB", "MiB"):
        count, rest = divmod(size_bytes, _MULTIPLIERS[unit.lower()])
        if not rest:
            return f"{count}{unit}"
    return str(size_bytes)


def format_seconds(seconds: float) -> str:
    """Write a duration for people ("3,012 s", "1.25 s", "12.5 ms").

    Args:
        seconds: Duration in seconds.
    """
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def two_digits(number: float) -> str:
    """Write a number that is roughly known for people, with two digits ("4,100", "13", "0.12")."""
    return f"{float(f'{number:.2g}'):,.12g}"


def about_seconds(seconds: float) -> str:
    """Write a duration that is roughly known for people ("4,100 s", "12 ms").

    Args:
        seconds: Duration in seconds.
    """
    return f"{two_digits(seconds)} s" if seconds >= 1 else f"{two_digits(seconds * 1000)} ms"


def read_length(name: str, value: Any, or_else: str = "") -> int:
    """A number of tokens: 131072, "128K" or "1M", in powers of 1024.

    Raises:
        ValueError: it is none, or 0.
    """
    match = _LENGTH.fullmatch(str(value)) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
    tokens = int(match[1]) * _TIMES[match[2].lower()] if match else 0
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(
            f"{name}={value!r} is not a number of tokens from 1 to {MOST_TOKENS}: give one like 131072, 128K or 1M"
            f"{or_else}"
        )
    return tokens


def read_whole_number(name: str, value: Any, least: int = 1) -> int:
    """A whole number that is not below a limit.

    Raises:
        ValueError: it is none, or smaller.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: give {least} or more, as a whole number")
    return value


def read_fraction(name: str, value: Any) -> float:
    """A number between 0 and 1.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"{name}={value!r}: give a number between 0 and 1, both excluded")
    return value
