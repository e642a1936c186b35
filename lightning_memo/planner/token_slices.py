"""Slices: ranges of tokens that run through a layer in one pass, the action for each, and the bytes that they save."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from lightning_memo.artifacts.compressed_layout import compressed_bytes
from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, INPUT, Place

ALIGNMENT_BYTES: Final = 64  # a cache line, which is also enough for every vectorized kernel

# GEMMs run at full speed on whole tiles of tokens. Short sequences are cut at alpha exactly.
TILE_TOKENS = 128
TILED_FROM_TOKENS = 2048
_MOST_FILLING: Final = compressed_bytes(1, 8)  # a block, for a tensor of a single value
# Kind of a storage plan for each kind of `SavedBytes`.
_KINDS: Final = {"out": ATTENTION, "lse": ATTENTION, "query": ALL, "key": ALL, "value": ALL, "other": ALL}


class Action(Enum):
    """What happens to the saved activations of a slice between forward and backward."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens `[start, stop)` of a layer's input and what happens to their activations.

    Attributes:
        start: First token.
        stop: Token after the last one.
        action: What happens to the activations, if `places` is None.
        places: Place of each kind of tensor, where a storage plan decides. Kinds are those of a storage plan, and
            matrix products by their names.
    """

    start: int
    stop: int
    action: Action
    places: tuple[tuple[str, Place], ...] | None = None

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def place(self, kind: str) -> Place | None:
        """Where tensors of a kind are stored; None if they are not.

        Args:
            kind: A kind of `SavedBytes` or of a storage plan, or the name of a matrix product.
        """
        if self.places is None:
            return "keep" if self.action is Action.KEEP and kind != INPUT else "swap"
        kind = _KINDS.get(kind, kind)
        return next((place for name, place in self.places if name == kind), None)

    def gathered(self, shards: int) -> TokenRange:
        """The range that attention sees if each of `shards` processes holds such a range of the layer's input."""
        return TokenRange(self.start * shards, self.stop * shards, self.action)


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """A tensor that a layer call saves for its backward.

    Attributes:
        kind: "input", "out" and "lse" (attention output and log-sum-exp, always swapped), "query", "key" and "value"
            (of attention), "other", "shared" (arguments that layers receive in addition to their input), or "state" (at
            the start of a slice that is recomputed; a swapped one saves as much more, the tokens before it).
        size_bytes: Bytes for all tokens.
        per_token: Whether the size is proportional to the tokens. False, for example, for a function of weights.
        swapped_bytes: Bytes in a slot if the tensor is compressed there; None if it is not.
    """

    kind: str
    size_bytes: int
    per_token: bool = True
    swapped_bytes: int | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes in a slot."""
        return self.size_bytes if self.swapped_bytes is None else self.swapped_bytes


def tile_of(tokens: int) -> int:
    """Number of tokens whose multiples are the bounds of slices of a sequence.

    Args:
        tokens: Length of the sequence.
    """
    return TILE_TOKENS if tokens >= TILED_FROM_TOKENS else 1


def swapped_tokens(tokens: int, alpha: float) -> int:
    """Number of tokens, counted from the first, that are swapped: `alpha * tokens`, in whole tiles for long sequences.

    Args:
        tokens: Length of the sequence.
        alpha: Fraction of the tokens to swap.
    """
    tile = tile_of(tokens)
    return tokens if alpha >= 1.0 else int(alpha * tokens / tile + 1e-9) * tile


def slice_tokens_by_alpha(
    tokens: int, alpha: float, longest: int | None = None, multiple: int = 1
) -> tuple[TokenRange, ...]:
    """Cut a sequence into MEMO's slices: `[0, alpha * tokens)` is swapped, the rest is recomputed (section 4.1).

    Args:
        tokens: Length of the sequence, a multiple of `multiple`.
        alpha: Fraction of the tokens to swap.
        longest: Maximum number of tokens of a slice; None for no limit.
        multiple: Slices begin at multiples of this many tokens.
    """
    bound = swapped_tokens(tokens, alpha) // multiple * multiple
    ranges = []
    for start, stop, action in ((0, bound, Action.SWAP), (bound, tokens, Action.RECOMPUTE)):
        step = max(longest // multiple, 1) * multiple if longest else max(stop - start, 1)
        ranges += [TokenRange(a, min(a + step, stop), action) for a in range(start, stop, step)]
    return tuple(ranges)


def aligned(size_bytes: int) -> int:
    """Round a size up to the alignment of the tensors of a slot."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slot_bytes(saved: Sequence[SavedBytes], tokens: int, slices: Sequence[TokenRange], schedule: str) -> int:
    """Bytes of the slot that holds all slices of a layer call, alignment included.

    Args:
        saved: Tensors that the call saves when it runs as one slice.
        tokens: Number of tokens for which `saved` was measured.
        slices: Slices of the plan.
        schedule: "layer" or "nest".
    """
    whole = schedule == "nest" or len(slices) == 1
    total = 0
    for item in saved:
        if item.kind == "input" or (item.kind == "lse" and len(slices) == 1):
            total += in_slot(item, slices[-1].stop, tokens)
            continue
        total += sum(
            in_slot(item, part.tokens, tokens)
            for n, part in enumerate(slices)
            if _is_stored(item.kind, part.action, whole, last=n == len(slices) - 1)
        )
    return total


def slice_slot_bytes(saved: Sequence[SavedBytes], tokens: int, slices: Sequence[TokenRange]) -> list[int]:
    """Bytes of each slice's slot if every slice of a layer call has its own, alignment included.

    Args:
        saved: Tensors that the call saves for `tokens` tokens.
        tokens: Number of tokens for which `saved` was measured.
        slices: Slices of the plan.
    """
    always = ("input", "out", "lse", "key", "value", "shared", "state")

    @functools.cache  # most of a layer's slices, of which there may be thousands, are alike
    def size(part_tokens: int, swapped: bool) -> int:
        return sum(in_slot(item, part_tokens, tokens) for item in saved if swapped or item.kind in always)

    return [size(part.tokens, part.action is Action.SWAP) for part in slices]


def share(item: SavedBytes, part_tokens: int, tokens: int) -> int:
    """Bytes of a saved tensor for `part_tokens` of the `tokens` for which it was measured."""
    return -(-item.size_bytes * part_tokens // tokens) if item.per_token else item.size_bytes


def in_slot(item: SavedBytes, part_tokens: int, tokens: int) -> int:
    """Bytes of a slot that a saved tensor takes for `part_tokens` of the `tokens` for which it was measured."""
    if item.swapped_bytes is None:
        return aligned(share(item, part_tokens, tokens))
    # The last block of the part may be filled up.
    return aligned(-(-item.swapped_bytes * part_tokens // tokens) + _MOST_FILLING)


def _is_stored(kind: str, action: Action, whole: bool, last: bool) -> bool:
    if action is Action.KEEP:
        return False
    if kind == "state":
        return not whole
    if kind in ("out", "lse") or action is Action.SWAP:
        return True
    # Later slices attend to the keys and values of a recomputed one.
    return kind in ("key", "value") and not whole and not last
