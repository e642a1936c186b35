"""Tables of a plan with `storage="kinds"`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_memo.artifacts.storage_plan import CallPlan, StoragePlan
from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, INPUT, PLACES, CallCosts, Place, StorageCosts
from lightning_memo.planner.storage.sensitivity import ResourceSensitivity, resource_sensitivities
from lightning_memo.utils.units import format_bytes, format_seconds

_MOVED_AND_KEPT: tuple[tuple[Place, ...], ...] = (("swap", "spill"), ("keep",))
_PLACES: dict[Place, str] = {"keep": "kept", "swap": "swapped", "spill": "on the disk"}
_NAMES = {INPUT: "layer input", ATTENTION: "attention output", ALL: "everything else"}


def kinds_table(plan: StoragePlan, costs: StorageCosts) -> Table:
    """Make a table of the shares of the tokens for which each kind of tensor is kept, swapped or recomputed.

    Swapped tensors are on the host. If the plan spills, a further column shows the share on the disk.

    Args:
        plan: The storage plan.
        costs: Costs that the plan was made from.
    """
    table = Table(
        title="Kinds of tensors, in shares of the tokens",
        caption="The last two layer calls keep on the device what other calls of their class swap."
        if costs.leaving_calls < costs.calls
        else None,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layer calls")
    table.add_column("kind")
    places = [place for place in PLACES if place != "spill" or _spills(plan)]
    for name in ("size", *(_PLACES[place] for place in places), "recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (call, stored) in enumerate(zip(costs.classes, plan.calls, strict=True)):
        label = numbers_text([n for n, of in enumerate(costs.call_classes) if of == number])
        for kind, size, moved in zip(call.kinds, call.sizes, call.sizes_in("swap"), strict=True):
            shares = _shares(kind, stored, plan.tokens, places)
            text = format_bytes(size) + (f", {format_bytes(moved)} in fp8" if moved != size else "")
            table.add_row(label, _NAMES.get(kind, f"  of it {kind}"), text, *shares)
            label = ""
    return table


def _spills(plan: StoragePlan) -> bool:
    return any(r.place == "spill" for call in plan.calls for r in call.ranges)


def _shares(kind: str, stored: CallPlan, tokens: int, places: Sequence[Place]) -> list[str]:
    there = stored.tokens(kind)
    if kind not in (INPUT, ATTENTION, ALL):
        there += stored.tokens(ALL)  # the products of these tokens are stored, too
    held = [stored.tokens(kind, place) for place in places]
    return [f"{count / tokens:.0%}" if count else "-" for count in (*held, tokens - there)]


def numbers_text(numbers: Iterable[int]) -> str:
    """Write ascending numbers as text: "0-3, 6"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def resources_table(plan: StoragePlan) -> Table:
    """Make a table of the resources, and how much time one more GiB or GB/s of each would save.

    Args:
        plan: A plan with the prices of its linear program.
    """
    table = Table(title="Gain from more of each resource", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("resource")
    for name in ("budget", "used", "1 more saves up to"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in resource_sensitivities(plan):
        table.add_row(row.resource, *_resource_cells(row))
    return table


def _resource_cells(row: ResourceSensitivity) -> Sequence[str]:
    used = "" if row.used is None else f"{row.used:.4g} {row.unit}"
    gain = f"{format_seconds(row.seconds)} ({row.percent:.1f} %)" if row.binds else "-"
    return f"{row.limit:.4g} {row.unit}", used, gain


def call_bytes(call: CallCosts, stored: CallPlan, tokens: int) -> tuple[int, int, int]:
    """Bytes that a layer call swaps (to host and disk), recomputes and keeps, without the alignment of slots.

    Args:
        call: Costs of the call.
        stored: Plan of the call.
        tokens: Tokens of the call.
    """
    moved, kept = (
        sum(
            -(-size * stored.tokens(kind, place) // tokens)
            for place in places
            for kind, size in zip(call.kinds, call.sizes_in(place), strict=True)
        )
        for places in _MOVED_AND_KEPT
    )
    whole = dict(zip((INPUT, ATTENTION, ALL), call.sizes, strict=False))
    again = sum(size * (tokens - stored.tokens(kind)) // tokens for kind, size in whole.items())
    return moved, again, kept
