"""Where attention finds the keys and values of a slice."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeysValuesSource(Protocol):
    """Keys and values of one slice, `[batch, heads, tokens, head_dim]`, stored or recomputed."""

    def peek(self) -> tuple[Tensor, Tensor]:
        """Return them while the forward still runs."""

    def end_forward(self) -> None:
        """Drop what only the forward needs."""

    def load(self) -> tuple[Tensor, Tensor]:
        """Return them on the device in the backward."""
