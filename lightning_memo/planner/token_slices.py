"""Slices: ranges of tokens that run through a layer as one unit, and what is done with what they save.

Pure: imports neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from lightning_memo.artifacts.storage_costs import ALL, ATTENTION, INPUT, Place

ALIGNMENT_BYTES: Final = 64  # a cache line; also enough for every vectorised kernel

# GEMMs run at full speed on whole tiles of tokens; short sequences are cut where alpha says.
TILE_TOKENS = 128
TILED_FROM_TOKENS = 2048


# The kinds of a storage plan that hold those of `SavedBytes`.
_KINDS = {"out": ATTENTION, "lse": ATTENTION, "query": ALL, "key": ALL, "value": ALL, "other": ALL}


class Action(Enum):
    """What is done with a slice's saved activations between forward and backward."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens `[start, stop)` of a layer's input, their action, and the places of kinds where a plan names them.

    Kinds are those of `SavedBytes`, matrix products by their names, and those of a storage plan.
    """

    start: int
    stop: int
    action: Action
    places: tuple[tuple[str, Place], ...] | None = None

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def place(self, kind: str) -> Place | None:
        """Where tensors of a kind are stored, if they are."""
        if self.places is None:
            return "keep" if self.action is Action.KEEP and kind != INPUT else "swap"
        kind = _KINDS.get(kind, kind)
        return next((place for name, place in self.places if name == kind), None)

    def gathered(self, shards: int) -> TokenRange:
        """The range that attention sees where each of `shards` processes has such a range of the layer's input."""
        return TokenRange(self.start * shards, self.stop * shards, self.action)


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """One tensor that a layer call saves, for all tokens: its kind and size.

    Kinds: "input", "out", "lse" (always swapped), "query", "key", "value" (of attention), "other", and "shared" (what
    layers get beside their input).
    `per_token` is false for what is as large for one token as for all (a function of weights, say).
    """

    kind: str
    size_bytes: int
    per_token: bool = True


def swapped_tokens(tokens: int, alpha: float) -> int:
    """How many of the first tokens are swapped: `alpha * tokens`, in whole tiles where the sequence is long."""
    tile = TILE_TOKENS if tokens >= TILED_FROM_TOKENS else 1
    return tokens if alpha >= 1.0 else int(alpha * tokens / tile + 1e-9) * tile


def slice_tokens_by_alpha(
    tokens: int, alpha: float, longest: int | None = None, unit: int = 1
) -> tuple[TokenRange, ...]:
    """MEMO's slices: `[0, alpha * tokens)` swapped, the rest recomputed, each cut into slices of at most `longest`.

    All are multiples of `unit`, as `tokens` is.
    """
    bound = swapped_tokens(tokens, alpha) // unit * unit
    ranges = []
    for start, stop, action in ((0, bound, Action.SWAP), (bound, tokens, Action.RECOMPUTE)):
        step = max(longest // unit, 1) * unit if longest else max(stop - start, 1)
        ranges += [TokenRange(a, min(a + step, stop), action) for a in range(start, stop, step)]
    return tuple(ranges)


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment of regions of a slot."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slot_bytes(saved: Sequence[SavedBytes], tokens: int, slices: Sequence[TokenRange], schedule: str) -> int:
    """Bytes of the slot that these slices of a layer call fill, alignment included.

    Args:
        saved: What the call saves when it runs as one slice.
        tokens: Tokens for which `saved` was measured.
        slices: The slices to be run.
        schedule: "layer" or "nest".
    """
    whole = schedule == "nest" or len(slices) == 1
    total = 0
    for item in saved:
        if item.kind == "input" or (item.kind == "lse" and whole):
            total += aligned(share(item, slices[-1].stop, tokens))
            continue
        total += sum(
            aligned(share(item, part.tokens, tokens))
            for n, part in enumerate(slices)
            if _is_stored(item.kind, part.action, whole, last=n == len(slices) - 1)
        )
    return total


def unit_bytes(saved: Sequence[SavedBytes], tokens: int, slices: Sequence[TokenRange]) -> list[int]:
    """Bytes that each slice of a layer call fills where every slice has a slot of its own, alignment included.

    Args:
        saved: What the call saves for `tokens` tokens.
        tokens: See there.
        slices: The slices to be run.
    """
    always = ("input", "out", "lse", "key", "value", "shared")
    return [
        sum(
            aligned(share(item, part.tokens, tokens))
            for item in saved
            if item.kind in always or part.action is Action.SWAP
        )
        for part in slices
    ]


def share(item: SavedBytes, part_tokens: int, tokens: int) -> int:
    """Bytes of a tensor for a part of the tokens."""
    return -(-item.size_bytes * part_tokens // tokens) if item.per_token else item.size_bytes


def _is_stored(kind: str, action: Action, whole: bool, last: bool) -> bool:
    if action is Action.KEEP:
        return False
    if kind in ("out", "lse") or action is Action.SWAP:
        return True
    # Later slices attend to the keys and values of a recomputed one.
    return kind in ("key", "value") and not whole and not last
