"""The slices of a storage plan, each with the place of every kind of tensor.

Slices are bounded by the union of the bounds of the plan's ranges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_memo.artifacts.storage_plan import CallPlan, StoragePlan, StoredRange
from lightning_memo.artifacts.swap_plan import StoredBytes
from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, INPUT, Place
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, in_slot, share


def stored_slices(plan: StoragePlan, call: int, tokens: int) -> tuple[TokenRange, ...]:
    """Return the slices of a layer call.

    Args:
        plan: The plan.
        call: Position among the layer calls that are alive.
        tokens: Number of tokens in the layer's input. Ranges are scaled if the plan was made for another number.
    """
    ranges = plan.calls[plan.call_classes[call % len(plan.call_classes)]].ranges

    def scaled(bound: int) -> int:
        return bound * tokens // plan.tokens

    bounds = sorted({0, tokens, *(scaled(bound) for r in ranges for bound in (r.start, r.stop))})
    slices = []
    for start, stop in pairwise(bounds):
        places = {r.kind: r.place for r in ranges if scaled(r.start) <= start and stop <= scaled(r.stop)}
        slices.append(TokenRange(start, stop, tuple(places.items())))
    return tuple(slices)


def with_common_bounds(plan: StoragePlan, others: Collection[int] = ()) -> StoragePlan:
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


def stored_bytes(saved: Sequence[SavedBytes], tokens: int, slices: Sequence[TokenRange], place: Place) -> int:
    """Return the bytes that a layer call stores in a place, including alignment where the place is a slot.

    Args:
        saved: The tensors that the call saves for `tokens` tokens, and the outputs of its matrix products.
        tokens: Number of tokens that `saved` was measured for.
        slices: The slices to be run.
        place: The place: only what is swapped or spilled is in a slot.
    """
    return sum(
        share(item, part.tokens, tokens) if place == "keep" else in_slot(item, part.tokens, tokens)
        for part in slices
        for item in saved
        if part.place(item.kind) == place
    )


def stored_bytes_of_calls(
    plan: StoragePlan, calls: Sequence[Sequence[SavedBytes]], tokens: int, leaving: int
) -> StoredBytes:
    """Return the bytes that all layer calls store by a plan.

    Args:
        plan: The plan.
        calls: For each layer call, the tensors that it saves, and the outputs of its matrix products.
        tokens: Number of tokens that `calls` were measured for.
        leaving: Number of layer calls that leave the device, which are the first ones.
    """
    swapped, spilled, kept = [], [], []
    for number, saved in enumerate(calls):
        slices = stored_slices(plan, number, tokens)
        swapped.append(stored_bytes(saved, tokens, slices, "swap"))
        spilled.append(stored_bytes(saved, tokens, slices, "spill"))
        kept.append(stored_bytes(saved, tokens, slices, "keep"))
    slot = max(map(sum, zip(swapped, spilled, strict=True)))
    return StoredBytes(slot=slot, host=sum(swapped[:leaving]), kept=sum(kept), spill=tuple(spilled))


def why_not_stored(plan: StoragePlan, nested: bool) -> str:
    """Return why no layer can run by a plan, which may come from a file; empty if layers can.

    Args:
        plan: The plan.
        nested: Whether attention runs over all slices of a layer at once.
    """
    if not plan.call_classes or not set(plan.call_classes) <= set(range(len(plan.calls))):
        return "its layer calls are of classes that it does not have"
    wrong = (why for call in plan.calls if (why := _why_not(call, plan.tokens, nested)))
    return next(wrong, "")


def _why_not(call: CallPlan, tokens: int, nested: bool) -> str:
    kinds = {r.kind: [o for o in call.ranges if o.kind == r.kind] for r in call.ranges}
    for kind, ranges in kinds.items():
        ordered = sorted(ranges, key=lambda r: r.start)
        bounds = [0, *(bound for r in ordered for bound in (r.start, r.stop)), tokens]
        if bounds != sorted(bounds):
            return f"ranges of {kind} overlap, or leave the {tokens} tokens"
    if call.tokens(INPUT) != tokens:
        return "layer inputs have no place for some tokens"
    if nested and call.tokens(ATTENTION) != tokens:
        return "attention runs over all tokens at once, and its outputs have no place for some of them"
    needy = (r for r in call.ranges if r.kind == ALL)
    stored = [range(r.start, r.stop) for r in call.ranges if r.kind == ATTENTION]
    if any(not any(token in s for s in stored) for r in needy for token in (r.start, r.stop - 1)):
        return "all is stored of tokens whose attention output is not"
    return ""
