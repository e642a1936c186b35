"""Numbers as people write them.

Pure: imports neither torch nor Lightning.
"""

from __future__ import annotations

import re
from typing import Any, Final

MOST_TOKENS: Final = 2**30
"""Of a sequence; longer ones are neither asked nor tried."""

_LENGTH: Final = re.compile(r"\s*([0-9]{1,12})\s*([KkMm]?)\s*", re.ASCII)
_TIMES: Final = {"": 1, "k": 2**10, "m": 2**20}


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
