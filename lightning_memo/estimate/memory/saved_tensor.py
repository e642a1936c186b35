"""A tensor that a layer saves for its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a layer saves for its backward."""

    name: str
    width: int
    """Elements per token."""

    element_bytes: int
    kind: Literal["input", "attention", "other"] = "other"

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.element_bytes
