"""Tables of a plan: what happens to the tensors of layer calls and to kinds of tensors, and what resources save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_memo.artifacts.costs import (
    ATTENTION,
    INPUT,
    MOVED,
    OTHER,
    PLACES,
    CallCosts,
    Place,
    StorageCosts,
    is_product,
)
from lightning_memo.artifacts.prices import ResourceSensitivity
from lightning_memo.artifacts.swap_plan import AttentionTrial, CallPlan, StoragePlan, SwapPlan
from lightning_memo.utils.units import format_bytes, format_seconds

_MOST_RANGES: Final = 3  # ranges of layer calls named in a cell
_PLACES: dict[Place, str] = {"device": "kept", "host": "swapped", "disk": "on the disk"}
_NAMES = {INPUT: "layer input", ATTENTION: "attention output", OTHER: "everything else"}


def call_bytes(swap: SwapPlan, costs: StorageCosts) -> Iterator[tuple[int, int, int]]:
    """Yield the bytes that each layer call swaps (to host and disk), recomputes, and keeps on the device.

    They are those between its forward and its backward, without the alignment of slots.
    """
    storage = swap.storage
    for number in range(costs.calls):
        call = costs.classes[costs.call_classes[number]]
        moved, again, kept = _stored_bytes(call, storage.call(number), storage.tokens)
        yield (moved, again, kept) if number < swap.swapped_calls else (0, again, moved + kept)


def _stored_bytes(call: CallCosts, stored: CallPlan, tokens: int) -> tuple[int, int, int]:
    moved, kept = stored.stored_bytes(call, tokens, *MOVED), stored.stored_bytes(call, tokens, "device")
    whole = dict(zip((INPUT, ATTENTION, OTHER), call.sizes, strict=False))
    again = sum(size * (tokens - stored.tokens(kind)) // tokens for kind, size in whole.items())
    return moved, again, kept


def calls_table(swap: SwapPlan, costs: StorageCosts) -> Table:
    """Make a table of the bytes that each layer call swaps, recomputes and keeps. Equal layer calls share a row.

    Args:
        swap: The plan.
        costs: Costs of its layer calls.
    """
    table = _table("Layer calls")
    table.add_column("layer calls", no_wrap=True)
    for name in ("swapped", "recomputed", "kept on device"):
        table.add_column(f"{name}, each", justify="right", no_wrap=True)
    alike: dict[tuple[int, int, int], list[int]] = {}
    for call, sizes in enumerate(call_bytes(swap, costs)):
        alike.setdefault(sizes, []).append(call)
    for sizes, calls in alike.items():
        table.add_row(_numbers_text(calls), *(format_bytes(size) if size else "-" for size in sizes))
    return table


def kinds_table(plan: StoragePlan, costs: StorageCosts) -> Table:
    """Make a table of the shares of the tokens for which each kind of tensor is kept, swapped or recomputed.

    Swapped tensors are on the host. If the plan spills, a further column shows the share on the disk.

    Args:
        plan: The storage plan.
        costs: Costs that the plan was made from.
    """
    table = _table("Kinds of tensors, in shares of the tokens")
    if costs.swapped_calls < costs.calls:
        table.caption = "The last two layer calls keep on the device what other calls of their class swap."
    table.add_column("layer calls")
    table.add_column("kind", overflow="fold")
    places = [place for place in PLACES if place != "disk" or _spills(plan)]
    for name in ("size", *(_PLACES[place] for place in places), "recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (call, stored) in enumerate(zip(costs.classes, plan.calls, strict=True)):
        label = _numbers_text([n for n, of in enumerate(costs.call_classes) if of == number])
        for kind, size in zip(call.kinds, call.sizes, strict=True):
            if size:
                shares = _shares(kind, stored, plan.tokens, places)
                table.add_row(label, _NAMES.get(kind, f"  of it {kind}"), format_bytes(size), *shares)
                label = ""
    return table


def trials_table(trials: Sequence[AttentionTrial]) -> Table:
    """Make a table of the attention kernels among which one was chosen, the fastest first."""
    table = _table("Attention kernels, forward and backward of a call")
    for name in ("kernel", "time"):
        table.add_column(name)
    for trial in sorted(trials, key=lambda t: (t.seconds is None, t.seconds)):
        measured = "not measured" if trial.seconds is None else format_seconds(trial.seconds)
        table.add_row(trial.name, Text(f"not used: {trial.why_not}" if trial.why_not else measured))
    return table


def resources_table(rows: Sequence[ResourceSensitivity]) -> Table:
    """Make a table of the resources, and how much time one more GiB or GB/s of each would save."""
    table = _table("Time saved by more of each resource")
    table.add_column("resource")
    for name in ("budget", "used", "saved by 1 more, at most"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        used = "" if row.used is None else f"{row.used:.4g} {row.unit}"
        gain = f"{format_seconds(row.seconds)} ({row.percent:.1f} %)" if row.binds else "-"
        table.add_row(row.resource, f"{row.limit:.4g} {row.unit}", used, gain)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _spills(plan: StoragePlan) -> bool:
    return any(r.place == "disk" for call in plan.calls for r in call.ranges)


def _shares(kind: str, stored: CallPlan, tokens: int, places: Sequence[Place]) -> list[str]:
    there = stored.tokens(kind)
    if is_product(kind):
        there += stored.tokens(OTHER)  # the products of these tokens are stored, too
    held = [stored.tokens(kind, place) for place in places]
    counts = [*held, tokens - there]
    return [f"{percent} %" if count else "-" for count, percent in zip(counts, percents(counts), strict=True)]


def percents(counts: Sequence[int]) -> list[int]:
    """Return whole percents of a sum, which make 100 together."""
    whole = max(sum(counts), 1)
    floors = [100 * count // whole for count in counts]
    by_rest = sorted(range(len(counts)), key=lambda n: -(100 * counts[n] % whole))
    for n in by_rest[: 100 - sum(floors)] if any(counts) else []:
        floors[n] += 1
    return floors


def _numbers_text(numbers: Iterable[int]) -> str:
    """Write ascending numbers as text: "0-3, 6"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = f", ... ({sum(map(len, runs))})" if len(names) > _MOST_RANGES else ""
    return f"{', '.join(names[:_MOST_RANGES])}{more}"
