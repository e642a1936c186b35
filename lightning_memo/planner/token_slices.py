"""Slices: ranges of tokens that run through a layer in one pass, the action for each, and the bytes that they save."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning_memo.artifacts.slot_layouts import compressed_bytes
from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, INPUT, Place

ALIGNMENT_BYTES: Final = 64  # a cache line, which is also enough for every vectorized kernel

# GEMMs run at full speed on whole tiles of tokens. Short sequences are cut at alpha exactly.
TILE_TOKENS = 128
TILED_FROM_TOKENS = 2048
_MOST_FILLING: Final = compressed_bytes(1, 8)  # a block, for a tensor of a single value
KEPT: Final[tuple[tuple[str, Place], ...]] = ((INPUT, "swap"), (ATTENTION, "keep"), (ALL, "keep"))
"""Places of a slice whose tensors stay on the device."""
SWAPPED: Final[tuple[tuple[str, Place], ...]] = (
    (INPUT, "swap"),
    (ATTENTION, "swap"),
    (ALL, "swap"),
    ("state", "swap"),
)
"""Places of a slice that a single alpha swaps."""
RECOMPUTED: Final[tuple[tuple[str, Place], ...]] = (
    (INPUT, "swap"),
    (ATTENTION, "swap"),
    ("key", "swap"),
    ("value", "swap"),
    ("state", "swap"),
)
"""Places of a slice that a single alpha recomputes. Later slices attend to its keys and values."""
# Kind of a storage plan for each kind of `SavedBytes`.
_KINDS: Final = {"out": ATTENTION, "lse": ATTENTION, "query": ALL, "key": ALL, "value": ALL, "other": ALL}
KINDS: Final = (INPUT, ATTENTION, ALL, *_KINDS, "shared", "state")
"""All kinds of tensors but matrix products, none of which has such a name."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens `[start, stop)` of a layer's input, and where their saved tensors wait for the backward.

    Attributes:
        start: First token.
        stop: Token after the last one.
        places: Place of each kind of tensor that is stored. Kinds are those of a storage plan, those of `SavedBytes`
            where they have a place of their own, and matrix products by their names.
    """

    start: int
    stop: int
    places: tuple[tuple[str, Place], ...]

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def recomputes(self) -> bool:
        """Whether tensors of these tokens are computed again in the backward."""
        return self.place(ALL) is None

    @property
    def has_products(self) -> bool:
        """Whether outputs of single matrix products are stored."""
        return any(kind not in KINDS for kind, _ in self.places)

    def place(self, kind: str) -> Place | None:
        """Where tensors of a kind are stored; None if they are not.

        Args:
            kind: A kind of `SavedBytes` or of a storage plan, or the name of a matrix product.
        """
        found = next((place for name, place in self.places if name == kind), None)
        if found is None and kind in _KINDS:
            return self.place(_KINDS[kind])
        return found

    @property
    def spilled(self) -> TokenRange:
        """The same tokens with the disk in place of the host."""
        return replace(self, places=tuple((kind, "spill" if place == "swap" else place) for kind, place in self.places))

    def gathered(self, shards: int) -> TokenRange:
        """The range that attention sees if each of `shards` processes holds such a range of the layer's input."""
        return replace(self, start=self.start * shards, stop=self.stop * shards)


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
    for start, stop, places in ((0, bound, SWAPPED), (bound, tokens, RECOMPUTED)):
        step = max(longest // multiple, 1) * multiple if longest else max(stop - start, 1)
        ranges += [TokenRange(a, min(a + step, stop), places) for a in range(start, stop, step)]
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
        total += sum(
            in_slot(item, part.tokens, tokens)
            for n, part in enumerate(slices)
            if _is_stored(item.kind, part, whole, last=n == len(slices) - 1)
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

    return [size(part.tokens, not part.recomputes) for part in slices]


def share(item: SavedBytes, part_tokens: int, tokens: int) -> int:
    """Bytes of a saved tensor for `part_tokens` of the `tokens` for which it was measured."""
    return -(-item.size_bytes * part_tokens // tokens) if item.per_token else item.size_bytes


def in_slot(item: SavedBytes, part_tokens: int, tokens: int) -> int:
    """Bytes of a slot that a saved tensor takes for `part_tokens` of the `tokens` for which it was measured."""
    if item.swapped_bytes is None:
        return aligned(share(item, part_tokens, tokens))
    # The last block of the part may be filled up.
    return aligned(-(-item.swapped_bytes * part_tokens // tokens) + _MOST_FILLING)


def _is_stored(kind: str, part: TokenRange, whole: bool, last: bool) -> bool:
    """Return whether a slice stores tensors of a kind in the slot of its layer call."""
    if kind == "state" and whole:
        return False
    if part.recomputes and kind in ("key", "value") and (whole or last):  # no later slice attends to them
        return False
    return part.place(kind) == "swap"
