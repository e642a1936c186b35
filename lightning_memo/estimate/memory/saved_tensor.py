"""A tensor that a layer saves for its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.artifacts.compressed_layout import BLOCK, compressed_bytes

_EXACT: Final = ("query", "key", "value", "residual", "tanh")  # of attention, and of a norm that subtracts a mean
_LEAST_SHARE: Final = 4  # of the layer's input, as in `lightning_memo.engine.saved_tensors.compression`


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

    def compressed_bytes_per_token(self, hidden: int) -> int | None:
        """Bytes with `swap_precision="fp8"`, or None if the tensor stays exact.

        Args:
            hidden: Elements per token of the layer's input.
        """
        small = _LEAST_SHARE * self.width < hidden or self.element_bytes < 2
        if self.kind != "other" or self.name in _EXACT or small:
            return None
        return -(-self.width * compressed_bytes(BLOCK, self.element_bytes) // BLOCK)
