"""Slices for a step that does not fit the device, even with every layer recomputed as a whole."""

from __future__ import annotations

from typing import Final

from lightning_memo.artifacts.swap_plan import HostBacked
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.planner.token_slices import TILE_TOKENS

# Number of slices of a sequence, and what lives on the host besides swapped activations: the fastest comes first.
# Slices of a length that the user gave stay as long.
_LADDER: Final[tuple[tuple[int, HostBacked], ...]] = ((16, "none"), (32, "attention"), (64, "all"))
_MOVED: Final = {"none": 0, "auto": 1, "attention": 1, "all": 2}  # by what lives on the host


class ShorterSlices:
    """Cuts layers into more and more slices, as long as a step does not fit the device.

    A slice recomputes only its own activations. Keys and values, and then hidden states, move to the host last.

    Args:
        engine: The engine of the run.
        config: The settings of the strategy. Slices that they ask for are left as they are.
        alone: Whether this is the only process.
    """

    def __init__(self, engine: Engine, config: MemoConfig, alone: bool) -> None:
        self._engine, self._config, self._tried = engine, config, 0
        self._given = None if config.slice_tokens == "auto" else int(config.slice_tokens)
        free = self._given is None or (config.host_backed == "auto" and config.schedule != "slice")
        self._may = alone and free and config.storage != "kinds" and config.schedule != "nest"
        # Layers of several stacks, and those that go to a disk, leave the device as a whole.
        self._whole = config.spill_path is not None or engine.settings.stacks > 1
        self._ladder = _LADDER[:1] if self._whole or config.host_backed == "none" else _LADDER

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

    @property
    def advice(self) -> str:
        """What takes less device memory, as far as settings and layers allow it."""
        ways = ["shorten the sequence or the batch", self._slices_advice]
        ways.append("lower loss_chunk_tokens" if self._config.loss_chunk_tokens else "set loss_chunk_tokens")
        ways = [way for way in ways if way]
        return f"{', '.join(ways[:-1])}, or {ways[-1]}"

    @property
    def _slices_advice(self) -> str:
        config, settings, classes = self._config, self._engine.settings, self._engine.layer_classes
        if classes.why_whole or settings.slice_tokens == 1:
            return ""
        way = "set slice_tokens" if config.storage != "kinds" else 'set storage="alpha" and slice_tokens'
        if settings.slice_tokens is not None:
            given = config.slice_tokens != "auto"
            way = "lower slice_tokens" if given else f"set slice_tokens below {settings.slice_tokens}"
        nests = bool(classes.why_nest) or settings.schedule == "nest"
        more = not (self._whole or nests or settings.host_backed == "all")
        return f"{way} (host_backed='all' takes the least)" if more else way

    def _next(self) -> list[tuple[int, int, HostBacked]]:
        """The rest of the ladder: number of the rung, tokens of a slice, and what lives on the host."""
        whole, settings = self._engine.profiled_tokens, self._engine.settings
        if self._given is None:
            rungs = [(n, _tiled(whole, slices), backed) for n, (slices, backed) in enumerate(self._ladder, 1)]
            return [rung for rung in rungs if rung[0] > self._tried and rung[1] < (settings.slice_tokens or whole)]
        moved = _MOVED[settings.host_backed]
        rungs = [(n, self._given, backed) for n, (_, backed) in enumerate(self._ladder, 1) if _MOVED[backed] > moved]
        return rungs if self._given < whole else []


def _tiled(tokens: int, slices: int) -> int:
    each = max(-(-tokens // slices), 1)
    tile = TILE_TOKENS if each > TILE_TOKENS else 1
    return -(-each // tile) * tile
