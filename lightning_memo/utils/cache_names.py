"""The names of key-value caches in the calls and outputs of transformers' models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

CACHE_NAMES: Final = ("past_key_values", "cache")  # the first one is deprecated since transformers 5.24


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the key-value cache among a call's arguments by name; `None` if there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)
