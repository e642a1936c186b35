"""Tables of what a plan does. Formatting only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.table import Table
from rich.text import Text

from lightning_memo.artifacts.plan import Plan
from lightning_memo.reports.storage_tables import call_bytes, kinds_table, resources_table
from lightning_memo.utils.units import format_bytes, format_seconds

_MOST_CALLS = 8  # named in a line


def plan_tables(plan: Plan) -> list[Table]:
    """All tables of a plan: `plan_table`, and where it says so kind by kind what is stored and what binds.

    Args:
        plan: any plan.
    """
    storage, costs = plan.swap.storage, plan.storage_costs
    if storage is None or costs is None:
        return [plan_table(plan)]
    return [plan_table(plan), kinds_table(storage, costs), resources_table(storage)]


def plan_table(plan: Plan) -> Table:
    """Show what each layer call swaps, recomputes and keeps, and what the whole plan needs.

    Layer calls that do the same share a row. The caption holds alpha, host and device memory, the expected step time
    and the reason.

    Args:
        plan: any plan.
    """
    table = Table(title=_title(plan), caption=Text("\n".join(_summary(plan))), caption_justify="left")
    table.add_column("layer calls", no_wrap=True)
    for name in ("swapped", "recomputed", "kept on device"):
        table.add_column(f"{name}, each", justify="right", no_wrap=True)
    first = 0
    for sizes, alike in groupby(_call_bytes(plan)):
        last = first + len(list(alike)) - 1
        table.add_row(f"layer {first}" if first == last else f"layers {first}-{last}", *_cells(sizes))
        first = last + 1
    return table


def _title(plan: Plan) -> Text:
    fingerprint = plan.fingerprint
    return Text(f"{fingerprint.model}, batch {fingerprint.batch} x {fingerprint.tokens:,} tokens")


def _call_bytes(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """Bytes that each layer call swaps, recomputes and keeps on the device between its forward and its backward."""
    for call in range(plan.costs.calls):
        moved, again, kept = _moved_again_kept(plan, call)
        yield (moved, again, kept) if call < plan.swap.swapped_calls else (0, again, moved + kept)


def _moved_again_kept(plan: Plan, call: int) -> tuple[int, int, int]:
    costs, swap, storage = plan.costs, plan.swap, plan.swap.storage
    if storage is not None and plan.storage_costs is not None:
        number = storage.call_classes[call]
        return call_bytes(plan.storage_costs.classes[number], storage.calls[number], storage.tokens)
    moved = costs.swapped_bytes(call, 1.0 if swap.mode == "plain" else swap.alpha)
    return moved, costs.swapped_bytes(call, 1.0) - moved, 0


def _cells(sizes: Iterable[int]) -> list[str]:
    return [format_bytes(size_bytes) if size_bytes else "-" for size_bytes in sizes]


def _summary(plan: Plan) -> list[str]:
    swap, budget = plan.swap, plan.budget
    slices = "" if swap.slice_tokens is None else f", slices of at most {swap.slice_tokens:,} tokens"
    backing = {"none": "", "attention": ", keys and values on the host", "all": ", all but a slice on the host"}
    what = f"alpha={swap.alpha:.4g}" if swap.storage is None else "kind by kind"
    how = f"{what}, {swap.schedule} schedule{slices}{backing[swap.host_backed]}"
    return [
        f"mode    {'plain, nothing swapped or recomputed' if swap.mode == 'plain' else f'memo, {how}'}",
        *_kernel(plan),
        f"host    {format_bytes(swap.host_bytes)} of {format_bytes(budget.host_bytes)} available",
        *_disk(plan),
        f"device  {format_bytes(plan.device_bytes)} of {format_bytes(budget.device_bytes)} available, of which "
        f"{format_bytes(plan.costs.fixed_device_bytes)} model state"
        + (f": {format_bytes(plan.device_excess_bytes)} too much" if plan.device_excess_bytes else ""),
        f"step    {format_seconds(plan.step_seconds)} expected, from a cold first step",
        plan.reason,
    ]


def _kernel(plan: Plan) -> list[str]:
    if plan.swap.mode == "plain":
        return []
    told = [f"kernel  {plan.swap.attention} attention"]
    trials = sorted(plan.attention_trials, key=lambda t: (t.seconds is None, t.seconds))
    told += [f"{trial.name} {format_seconds(trial.seconds)}" for trial in trials if trial.seconds is not None]
    told += [f"not {trial.name}: {trial.why_not}" for trial in trials if trial.why_not]
    return ["; ".join(told)]


def _disk(plan: Plan) -> list[str]:
    swap, available = plan.swap, plan.budget.spill_bytes
    if not available:
        return []
    calls = [str(call) for call in range(swap.swapped_calls) if swap.bytes_to_spill(call)]
    shown = ", ".join(calls if len(calls) <= _MOST_CALLS else [*calls[:_MOST_CALLS], "..."])
    which = f"layer calls {shown} ({len(calls)} of the {swap.swapped_calls} swapped)" if calls else "not needed"
    return [f"disk    {format_bytes(swap.spill_bytes)} of {format_bytes(available)} available: {which}"]
