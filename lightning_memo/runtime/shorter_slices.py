"""Slices for a step that does not fit the device, even with every layer recomputed as a whole."""

from __future__ import annotations

from typing import Final

from lightning_memo.artifacts.swap_plan import HostBacked
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.planner.token_slices import TILE_TOKENS

# Number of slices of a sequence, and what lives on the host besides swapped activations: the fastest comes first.
_LADDER: Final[tuple[tuple[int, HostBacked], ...]] = ((16, "none"), (32, "attention"), (64, "all"))


class ShorterSlices:
    """Cuts layers into more and more slices, as long as a step does not fit the device.

    A slice recomputes only its own activations. Keys and values, and then hidden states, move to the host last.

    Args:
        engine: The engine of the run.
        config: The settings of the strategy. Slices that they ask for are left as they are.
        alone: Whether this is the only process.
    """

    def __init__(self, engine: Engine, config: MemoConfig, alone: bool) -> None:
        self._engine, self._tried = engine, 0
        self._may = alone and config.slice_tokens == "auto" and config.storage != "kinds" and config.schedule != "nest"
        # Layers of several stacks, and those that go to a disk, leave the device as a whole.
        whole = config.host_backed == "none" or config.spill_path is not None or engine.settings.stacks > 1
        self._ladder = _LADDER[:1] if whole else _LADDER

    @property
    def can_cut(self) -> bool:
        """Whether there are shorter slices to try."""
        classes = self._engine.layer_classes
        return self._may and not (classes.why_whole or classes.why_nest) and bool(self._next())

    def cut(self) -> str:
        """Cut layers into the next shorter slices, and return what to set to begin with them."""
        self._tried, tokens, host_backed = self._next()[0]
        self._engine.cut(tokens, host_backed)
        return f'slice_tokens={tokens}, host_backed="{host_backed}"'

    def _next(self) -> list[tuple[int, int, HostBacked]]:
        """The rest of the ladder: number of the rung, tokens of a slice, and what lives on the host."""
        whole, present = self._engine.profiled_tokens, self._engine.settings.slice_tokens
        rungs = [(n, _tiled(whole, slices), backed) for n, (slices, backed) in enumerate(self._ladder, 1)]
        return [rung for rung in rungs if rung[0] > self._tried and rung[1] < (present or whole)]


def _tiled(tokens: int, slices: int) -> int:
    each = max(-(-tokens // slices), 1)
    tile = TILE_TOKENS if each > TILE_TOKENS else 1
    return -(-each // tile) * tile
