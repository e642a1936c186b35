"""Pickles as a stranger writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Touches:
    """Creates a file when it is unpickled, as any code could run then."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)
