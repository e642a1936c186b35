"""Slices of a storage plan: ranges of tokens that run through a layer in one pass, and the bytes that they store."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from lightning_memo.artifacts.costs import ATTENTION, INPUT, MOVED, OTHER, PLACES, Place, is_product
from lightning_memo.artifacts.swap_plan import CallPlan, PlanMemory, StoragePlan, StoredRange

ALIGNMENT_BYTES: Final = 64  # a cache line, which is also enough for every vectorized kernel

# GEMMs run at full speed on whole tiles of tokens. Short sequences are cut at alpha exactly.
TILE_TOKENS = 128
TILED_FROM_TOKENS = 2048
KEPT: Final[tuple[tuple[str, Place], ...]] = ((INPUT, "host"), (ATTENTION, "device"), (OTHER, "device"))
"""Places of a slice whose tensors stay on the device."""
RECOMPUTED: Final[tuple[tuple[str, Place], ...]] = (
    (INPUT, "host"),
    (ATTENTION, "host"),
    ("key", "host"),
    ("value", "host"),
    ("state", "host"),
)
"""Places of a slice that a single alpha recomputes. Later slices attend to its keys and values."""
# Kind of a storage plan for each kind of `SavedBytes`.
_KINDS: Final = {"out": ATTENTION, "lse": ATTENTION, "query": OTHER, "key": OTHER, "value": OTHER}


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
        return self.place(OTHER) is None

    @property
    def has_products(self) -> bool:
        """Whether outputs of single matrix products are stored."""
        return any(is_product(kind) for kind, _ in self.places)

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
        return replace(self, places=tuple((kind, "disk" if place == "host" else place) for kind, place in self.places))

    def gathered(self, shards: int) -> TokenRange:
        """The range that attention sees if each of `shards` processes holds such a range of the layer's input."""
        return self if shards == 1 else replace(self, start=self.start * shards, stop=self.stop * shards)


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """A tensor that a layer call saves for its backward.

    Attributes:
        kind: "input", "out" and "lse" (attention output and log-sum-exp), "query", "key" and "value"
            (of attention), "other", "shared" (arguments that layers receive in addition to their input), or "state" (at
            the start of a slice that is recomputed; a swapped one saves as much more, the tokens before it).
        size_bytes: Bytes for all tokens.
        per_token: Whether the size is proportional to the tokens. False, for example, for a function of weights.
    """

    kind: str
    size_bytes: int
    per_token: bool = True


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


def plan_of_alpha(
    tokens: int,
    alpha: float,
    calls: int = 1,
    *,
    slice_tokens: int | None = None,
    multiple: int = 1,
    spilled: Collection[int] = (),
) -> StoragePlan:
    """Return MEMO's plan: tokens `[0, alpha * tokens)` are swapped, the rest is recomputed (section 4.1).

    Layer inputs and attention outputs of all tokens are swapped, and so are the keys and values of recomputed tokens,
    to which later slices attend.

    Args:
        tokens: Length of the sequence, a multiple of `multiple`.
        alpha: Fraction of the tokens to swap.
        calls: Number of layer calls that are alive at once.
        slice_tokens: Maximum number of tokens of a slice; None for no limit.
        multiple: Slices begin at multiples of this many tokens.
        spilled: Layer calls that go to the disk.
    """
    bound = swapped_tokens(tokens, alpha) // multiple * multiple
    return _plan(tokens, [_alpha_ranges(tokens, bound)], (0,) * calls, slice_tokens, spilled)


def plan_of_whole_layers(tokens: int, alpha: float, calls: int, spilled: Collection[int] = ()) -> StoragePlan:
    """Return MEMO's plan for layers that run as one slice: a fraction alpha of the layer calls is swapped.

    Args:
        tokens: Length of the sequence.
        alpha: Fraction of the layer calls to swap; the others are recomputed.
        calls: Number of layer calls that are alive at once.
        spilled: See `plan_of_alpha`.
    """
    classes = [_alpha_ranges(tokens, 0), _alpha_ranges(tokens, tokens)]
    swapped = spread(round(alpha * calls), calls)
    return _plan(tokens, classes, [int(call in swapped) for call in range(calls)], None, spilled)


def plan_of_plain_training(tokens: int, calls: int) -> StoragePlan:
    """Return a plan by which all tensors stay on the device.

    Args:
        tokens: Length of the sequence.
        calls: Number of layer calls that are alive at once.
    """
    ranges = tuple(StoredRange(kind=kind, place="device", start=0, stop=tokens) for kind in (INPUT, ATTENTION, OTHER))
    return StoragePlan(tokens=tokens, call_classes=(0,) * calls, calls=(CallPlan(ranges=ranges),))


def _alpha_ranges(tokens: int, bound: int) -> CallPlan:
    parts = [(INPUT, 0, tokens), (ATTENTION, 0, tokens), (OTHER, 0, bound), ("key", bound, tokens)]
    parts += [("value", bound, tokens), ("state", 0, tokens)]
    ranges = (StoredRange(kind=kind, place="host", start=a, stop=b) for kind, a, b in parts if a < b)
    return CallPlan(ranges=tuple(ranges))


def _plan(
    tokens: int, classes: list[CallPlan], of_calls: Sequence[int], slice_tokens: int | None, spilled: Collection[int]
) -> StoragePlan:
    """Return a plan of classes of layer calls, with others of the same ranges for the calls that go to the disk."""
    on_disk = [CallPlan(ranges=tuple(replace(r, place="disk") for r in call.ranges)) for call in classes]
    wanted = [(number, call in spilled) for call, number in enumerate(of_calls)]
    order = {key: n for n, key in enumerate(dict.fromkeys(wanted))}
    return StoragePlan(
        tokens=tokens,
        call_classes=tuple(order[key] for key in wanted),
        calls=tuple((on_disk if spills else classes)[number] for number, spills in order),
        slice_tokens=slice_tokens,
    )


def spread(chosen: int, calls: int) -> list[int]:
    """Return `chosen` of `calls` layer calls, evenly spaced."""
    return [call for call in range(calls) if call * chosen % calls < chosen]


def slices_of(plan: StoragePlan, call: int, tokens: int, multiple: int = 1) -> tuple[TokenRange, ...]:
    """Return the slices of a layer call, which are bounded by the plan's ranges and not longer than its slices.

    Args:
        plan: The plan.
        call: Position among the layer calls that are alive.
        tokens: Number of tokens in the layer's input. Ranges are scaled, to whole tiles, if the plan was made for
            another number.
        multiple: Slices begin at multiples of this many tokens.
    """
    ranges, unit = plan.call(call).ranges, math.lcm(tile_of(tokens), multiple)
    longest = max(plan.slice_tokens // multiple, 1) * multiple if plan.slice_tokens else tokens

    def scaled(bound: int) -> int:
        if tokens == plan.tokens or bound == plan.tokens:
            return bound * tokens // plan.tokens
        return bound * tokens // plan.tokens // unit * unit

    bounds = sorted({0, tokens, *(scaled(bound) for r in ranges for bound in (r.start, r.stop))})
    slices = []
    for start, stop in pairwise(bounds):
        places = {r.kind: r.place for r in ranges if scaled(r.start) <= start and stop <= scaled(r.stop)}
        parts = range(start, stop, longest)
        slices += [TokenRange(part, min(part + longest, stop), tuple(places.items())) for part in parts]
    return tuple(slices)


def with_common_bounds(plan: StoragePlan, others: Collection[int]) -> StoragePlan:
    """Return the same plan with the slices of all layer calls cut alike, as processes that share tokens need them.

    Args:
        plan: The plan.
        others: Where slices of other processes end.
    """
    bounds = sorted({bound for call in plan.calls for bound in call.bounds}.union(others))

    def cut(r: StoredRange) -> Iterator[StoredRange]:
        inner = [bound for bound in bounds if r.start < bound < r.stop]
        return (replace(r, start=start, stop=stop) for start, stop in pairwise((r.start, *inner, r.stop)))

    calls = (CallPlan(ranges=tuple(part for r in call.ranges for part in cut(r))) for call in plan.calls)
    return replace(plan, calls=tuple(calls))


def aligned(size_bytes: int) -> int:
    """Round a size up to the alignment of the tensors of a slot."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def stored_bytes(
    saved: Sequence[SavedBytes],
    tokens: int,
    slices: Sequence[TokenRange],
    *places: Place,
    joint_attention: bool = False,
) -> int:
    """Bytes that a layer call stores in some places, including alignment where the place is its slot.

    Args:
        saved: The tensors that the call saves for `tokens` tokens when it runs as one slice, and the outputs of its
            matrix products.
        tokens: Number of tokens that `saved` was measured for.
        slices: Slices of the plan.
        places: The places: what is swapped or spilled is in the slot.
        joint_attention: Whether attention runs over all slices at once.
    """
    whole = joint_attention or len(slices) == 1
    total = 0
    for n, part in enumerate(slices):
        alone = part.recomputes and (whole or n == len(slices) - 1)  # no later slice attends to it
        for item in saved:
            if (item.kind in ("key", "value") and alone) or (item.kind == "state" and whole):
                continue
            place = part.place(item.kind)
            if place in places:
                size = share if place == "device" else in_slot
                total += size(item, part.tokens, tokens)
    return total


def slot_bytes(saved: Sequence[SavedBytes], tokens: int, slices: Sequence[TokenRange]) -> int:
    """Bytes of the slot that holds all slices of a layer call; see `stored_bytes` for the arguments."""
    return stored_bytes(saved, tokens, slices, *MOVED)


def memory_of_plan(
    plan: StoragePlan,
    calls: Sequence[tuple[Sequence[SavedBytes], int]],
    leaving: int,
    *,
    joint_attention: bool = False,
    multiple: int = 1,
) -> PlanMemory:
    """Return the bytes that all layer calls store by a plan.

    Args:
        plan: The plan.
        calls: For each layer call, the tensors that it saves, outputs of its matrix products included where the plan
            names them, and the number of tokens for which they were measured.
        leaving: Number of layer calls that leave the device, which are the first ones.
        joint_attention: Whether attention runs over all slices of a layer at once.
        multiple: Slices begin at multiples of this many tokens.
    """

    @functools.cache  # calls of a class that save the same tensors are alike
    def sizes(number: int, alike: int) -> list[int]:
        saved, tokens = calls[alike]
        slices = slices_of(plan, plan.call_classes.index(number), plan.tokens, multiple)
        return [stored_bytes(saved, tokens, slices, place, joint_attention=joint_attention) for place in PLACES]

    first: dict[int, int] = {}
    of_calls = [sizes(plan.call_classes[n], first.setdefault(id(saved), n)) for n, (saved, _) in enumerate(calls)]
    kept, swapped, spilled = zip(*of_calls, strict=True)
    return PlanMemory(
        slot=max(map(sum, zip(swapped, spilled, strict=True))),
        host=sum(swapped[:leaving]),
        kept=sum(kept),
        disk=spilled if any(spilled) else (),
    )


def memory_of_slots(plan: StoragePlan, slot_bytes: Callable[[float], int], leaving: int) -> PlanMemory:
    """Return the memory of a plan with one alpha, given the bytes of a layer call's slot for a fraction of the tokens.

    Args:
        plan: The plan.
        slot_bytes: Returns the bytes of a slot if a fraction of the tokens is swapped and the others are recomputed.
        leaving: Number of layer calls that leave the device, which are the first ones.
    """
    slots = [slot_bytes(call.tokens(OTHER) / plan.tokens) for call in plan.calls]
    on_disk = [any(r.place == "disk" for r in call.ranges) for call in plan.calls]
    spill = tuple(slots[number] * on_disk[number] for number in plan.call_classes)
    return PlanMemory(
        slot=max(slots),
        host=sum(slots[number] for number in plan.call_classes[:leaving] if not on_disk[number]),
        disk=spill if any(spill) else (),
    )


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
    return aligned(share(item, part_tokens, tokens))


def why_not_stored(plan: StoragePlan, joint_attention: bool) -> str:
    """Return why no layer can run by a plan, which may come from a file; empty if layers can.

    Args:
        plan: The plan.
        joint_attention: Whether attention runs over all slices of a layer at once.
    """
    wrong = (why for call in plan.calls if (why := _why_not(call, plan.tokens, joint_attention)))
    return next(wrong, "")


def _why_not(call: CallPlan, tokens: int, joint_attention: bool) -> str:
    kinds = {r.kind: [o for o in call.ranges if o.kind == r.kind] for r in call.ranges}
    for kind, ranges in kinds.items():
        ordered = sorted(ranges, key=lambda r: r.start)
        bounds = [0, *(bound for r in ordered for bound in (r.start, r.stop)), tokens]
        if bounds != sorted(bounds):
            return f"ranges of {kind} overlap, or leave the {tokens} tokens"
    if call.tokens(INPUT) != tokens:
        return "layer inputs have no place for some tokens"
    if joint_attention and call.tokens(ATTENTION) != tokens:
        return "attention runs over all tokens at once, and its outputs have no place for some of them"
    needy = (r for r in call.ranges if r.kind == OTHER)
    stored = [range(r.start, r.stop) for r in call.ranges if r.kind == ATTENTION]
    if any(not any(token in s for s in stored) for r in needy for token in (r.start, r.stop - 1)):
        return "all is stored of tokens whose attention output is not"
    return ""
