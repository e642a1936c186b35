"""Tables and messages of plans and results.

They show what a plan does with the bytes of layer calls and kinds of tensors, which resources limit it, and what to do
where memory is short; and they compare runs, and show the use of planned memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import CallPlan, StoragePlan
from lightning_memo.planner.explain_plan import ResourceSensitivity, resource_sensitivities
from lightning_memo.planner.step_time import stored_bytes_of
from lightning_memo.utils.units import format_bytes, format_seconds

_MOST_CALLS: Final = 8  # layer calls named in a line
_MOST_RANGES: Final = 3  # ranges of layer calls named in a cell
_PLACES: dict[Place, str] = {"device": "kept", "host": "swapped", "disk": "on the disk"}
_NAMES = {INPUT: "layer input", ATTENTION: "attention output", OTHER: "everything else"}


def plan_tables(plan: Plan) -> list[Table]:
    """All tables of a plan: `plan_table`, and those of kinds of tensors and resources, if the plan names kinds.

    Args:
        plan: Any plan.
    """
    storage, costs = plan.swap.storage, plan.storage_costs
    if costs is None:
        return [plan_table(plan)]
    return [plan_table(plan), _kinds_table(storage, costs), _resources_table(plan)]


def plan_table(plan: Plan) -> Table:
    """Make a table of the bytes that each layer call swaps, recomputes and keeps.

    Equal layer calls share a row. The caption contains alpha, host and device memory, the expected step time and the
    reason for the plan.

    Args:
        plan: Any plan.
    """
    table = Table(title=_title(plan), caption=Text("\n".join(_summary(plan))), caption_justify="left")
    table.add_column("layer calls", no_wrap=True)
    for name in ("swapped", "recomputed", "kept on device"):
        table.add_column(f"{name}, each", justify="right", no_wrap=True)
    alike: dict[tuple[int, int, int], list[int]] = {}
    for call, sizes in enumerate(_call_bytes(plan)):
        alike.setdefault(sizes, []).append(call)
    for sizes, calls in alike.items():
        table.add_row(_layers(calls), *_cells(sizes))
    return table


def _layers(calls: list[int]) -> str:
    """Names of layer calls, in ascending order: "layers 0-3, 5"."""
    runs: list[list[int]] = []
    for call in calls:
        if runs and call == runs[-1][-1] + 1:
            runs[-1].append(call)
        else:
            runs.append([call])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = f", ... ({len(calls)})" if len(names) > _MOST_RANGES else ""
    return f"layer{'s' * (len(calls) > 1)} {', '.join(names[:_MOST_RANGES])}{more}"


def _title(plan: Plan) -> Text:
    fingerprint = plan.fingerprint
    return Text(f"{fingerprint.model}, batch {fingerprint.batch} x {fingerprint.tokens:,} tokens")


def _call_bytes(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """Bytes that each layer call swaps, recomputes and keeps on the device between its forward and its backward."""
    storage, costs = plan.swap.storage, plan.storage_costs or StorageCosts.of_layers(plan.costs)
    for call in range(plan.costs.calls):
        of_call = costs.classes[costs.call_classes[call % len(costs.call_classes)]]
        moved, again, kept = _stored_call_bytes(of_call, storage.call(call), storage.tokens)
        yield (moved, again, kept) if call < plan.swap.swapped_calls else (0, again, moved + kept)


def _stored_call_bytes(call: CallCosts, stored: CallPlan, tokens: int) -> tuple[int, int, int]:
    """Bytes that a layer call swaps (to host and disk), recomputes and keeps, without the alignment of slots.

    Args:
        call: Costs of the call.
        stored: Plan of the call.
        tokens: Tokens of the call.
    """
    moved, kept = stored_bytes_of(call, stored, tokens, *MOVED), stored_bytes_of(call, stored, tokens, "device")
    whole = dict(zip((INPUT, ATTENTION, OTHER), call.sizes, strict=False))
    again = sum(size * (tokens - stored.tokens(kind)) // tokens for kind, size in whole.items())
    return moved, again, kept


def _cells(sizes: Iterable[int]) -> list[str]:
    return [format_bytes(size_bytes) if size_bytes else "-" for size_bytes in sizes]


def _summary(plan: Plan) -> list[str]:
    swap, budget = plan.swap, plan.budget
    longest = swap.storage.slice_tokens
    slices = "" if longest is None else f", slices of at most {longest:,} tokens"
    streamed = {
        "none": "",
        "attention": ", keys and values on the host",
        "hidden": ", keys, values and hidden states on the host",
        "model": ", everything but the current slice on the host",
    }
    of_layers = " of the layers" if len({call.tokens(OTHER) for call in swap.storage.calls}) > 1 else ""
    what = f"alpha={swap.alpha:.4g}{of_layers}" if swap.storage.has_one_alpha else "by kind of tensor"
    joint = ", joint attention of all slices" if swap.joint_attention else ""
    how = f"{what}{joint}{slices}{streamed[swap.stream_from_host]}"
    return [
        f"mode    {'plain, nothing swapped or recomputed' if swap.plain else f'memo, {how}'}",
        *_kernel(plan),
        f"host    needs {format_bytes(swap.host_bytes)}, budget {format_bytes(budget.host_bytes)}",
        *_disk(plan),
        f"device  needs {format_bytes(plan.device_bytes)} ({format_bytes(plan.costs.fixed_device_bytes)} of it model "
        f"state), budget {format_bytes(budget.device_bytes)}"
        + (f": over by {format_bytes(plan.device_excess_bytes)}" if plan.device_excess_bytes else ""),
        _step(plan),
        plan.reason,
    ]


def _step(plan: Plan) -> str:
    seconds, in_flight = format_seconds(plan.step_seconds), plan.costs.in_flight
    if in_flight is None:
        return f"step    {seconds} expected, estimated from the first step"
    several = f"the {in_flight} micro-batches" if in_flight > 1 else "the micro-batch"
    return f"stage   {seconds} expected for all layer calls of {several} in flight, estimated from the first step"


def _kernel(plan: Plan) -> list[str]:
    if plan.swap.plain:
        return []
    parts = [f"kernel  {plan.swap.attention} attention"]
    trials = sorted(plan.attention_trials, key=lambda t: (t.seconds is None, t.seconds))
    parts += [f"{trial.name} {format_seconds(trial.seconds)}" for trial in trials if trial.seconds is not None]
    parts += [f"{trial.name} not used: {trial.why_not}" for trial in trials if trial.why_not]
    return ["; ".join(parts)]


def _disk(plan: Plan) -> list[str]:
    swap, available = plan.swap, plan.budget.disk_bytes
    if not available:
        return []
    calls = [str(call) for call in swap.disk_calls]
    shown = ", ".join(calls if len(calls) <= _MOST_CALLS else [*calls[:_MOST_CALLS], "..."])
    which = f"layer calls {shown} ({len(calls)} of the {swap.swapped_calls} swapped)" if calls else "not needed"
    return [f"disk    needs {format_bytes(swap.disk_bytes)}, budget {format_bytes(available)}: {which}"]


def _kinds_table(plan: StoragePlan, costs: StorageCosts) -> Table:
    """Make a table of the shares of the tokens for which each kind of tensor is kept, swapped or recomputed.

    Swapped tensors are on the host. If the plan spills, a further column shows the share on the disk.

    Args:
        plan: The storage plan.
        costs: Costs that the plan was made from.
    """
    table = Table(
        title="Kinds of tensors, in shares of the tokens",
        caption="The last two layer calls keep on the device what other calls of their class swap."
        if costs.swapped_calls < costs.calls
        else None,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layer calls")
    table.add_column("kind")
    places = [place for place in PLACES if place != "disk" or _spills(plan)]
    for name in ("size", *(_PLACES[place] for place in places), "recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (call, stored) in enumerate(zip(costs.classes, plan.calls, strict=True)):
        label = _numbers_text([n for n, of in enumerate(costs.call_classes) if of == number])
        for kind, size in zip(call.kinds, call.sizes, strict=True):
            shares = _shares(kind, stored, plan.tokens, places)
            table.add_row(label, _NAMES.get(kind, f"  of it {kind}"), format_bytes(size), *shares)
            label = ""
    return table


def _spills(plan: StoragePlan) -> bool:
    return any(r.place == "disk" for call in plan.calls for r in call.ranges)


def _shares(kind: str, stored: CallPlan, tokens: int, places: Sequence[Place]) -> list[str]:
    there = stored.tokens(kind)
    if is_product(kind):
        there += stored.tokens(OTHER)  # the products of these tokens are stored, too
    held = [stored.tokens(kind, place) for place in places]
    return [f"{count / tokens:.0%}" if count else "-" for count in (*held, tokens - there)]


def _numbers_text(numbers: Iterable[int]) -> str:
    """Write ascending numbers as text: "0-3, 6"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _resources_table(plan: Plan) -> Table:
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


def plan_shortage(plan: Plan, can_have_more: bool) -> str:
    """Describe the device memory that a plan lacks, and how to reduce it.

    Args:
        plan: Any plan.
        can_have_more: Whether a larger `device_memory` may help.

    Returns:
        One line; empty if the plan fits.
    """
    if not plan.device_excess_bytes:
        return ""
    ways = ["shorten the sequence"]
    if plan.swap.alpha > 0:
        ways.append('set a smaller alpha or "auto"')
    transients = plan.working_set_bytes - plan.swap.memory.buffer_bytes - plan.swap.memory.kept
    if transients == plan.costs.transient_device_bytes:  # the peak is outside the layers
        ways.append("lower loss_chunk_tokens")
    elif plan.swap.storage.slice_tokens is None:
        ways.append("set slice_tokens")
    if can_have_more:
        ways.append("raise device_memory")
    return (
        f"this plan needs {format_bytes(plan.device_bytes)} of device memory, {format_bytes(plan.device_excess_bytes)} "
        f"more than the budget of {format_bytes(plan.budget.device_bytes)}: {', '.join(ways[:-1])} or {ways[-1]}"
    )


def step_shortage(plan: Plan, taken_bytes: int) -> str:
    """Describe the device memory by which a step exceeded the budget, and how to reduce it.

    Args:
        plan: Plan of the step.
        taken_bytes: Peak of the step, model state included.

    Returns:
        One line; empty if the step stayed within the budget.
    """
    excess = taken_bytes - plan.budget.device_bytes
    if excess <= 0:
        return ""
    return (
        f"a step takes {format_bytes(taken_bytes)} of device memory, {format_bytes(excess)} more than the budget of "
        f"{format_bytes(plan.budget.device_bytes)}, although its plan expects {format_bytes(plan.device_bytes)}: lower "
        "device_memory by the excess, so that plans leave room for it, or shorten the sequence"
    )


_CAPTION = (
    "Step memory excludes parameters and optimizer state; budgets include them.\n"
    "Timed one after another: other load on the machine affects the times."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measured values of one row of `comparison_table`."""

    name: str
    step_seconds: float
    step_memory_bytes: int
    host_bytes: int
    tokens_per_second: float


def comparison_table(rows: Sequence[Measurement]) -> Table:
    """Make a table of measurements, with ratios to the first row in parentheses.

    Args:
        rows: The measurements, the baseline first.
    """
    table = Table(title="Comparison", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")  # fits 80 columns
    table.caption = Text(_CAPTION)
    table.add_column("", no_wrap=True)
    for name in ("step", "step memory", "host", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        base = rows[0]
        table.add_row(
            Text(row.name),
            format_seconds(row.step_seconds) + _ratio_text(row.step_seconds, base.step_seconds),
            format_bytes(row.step_memory_bytes) + _ratio_text(row.step_memory_bytes, base.step_memory_bytes),
            format_bytes(row.host_bytes) + _ratio_text(row.host_bytes, base.host_bytes),
            f"{row.tokens_per_second:,.0f}",
        )
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """How the memory requests of planned steps were served."""

    hits: int
    """Number of requests that were served at their planned offsets."""

    fitted: int
    """Number of requests that were served elsewhere in the arena, from free bytes."""

    missed: int
    """Number of requests that PyTorch's allocator served."""

    displaced: dict[str, int]
    """Number of requests that were not served at their planned offsets, by reason."""

    arena_bytes: int
    peak_live_bytes: int
    """Highest number of bytes of the arena in use."""

    lower_bound_bytes: int
    """Lower bound of the peak of any placement of the recorded step."""

    reorganisations: int | None
    """Number of times that PyTorch's allocator freed its cache and retried; None on a CPU, which has no cache."""


def memory_table(use: MemoryUse) -> Table:
    """Make a table of how planned memory was used.

    Args:
        use: Counters at the end of training.
    """
    table = Table(title="Planned memory", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    requests = max(use.hits + use.fitted + use.missed, 1)
    table.add_row(
        "requests in the arena", f"{use.hits + use.fitted:,} of {requests:,} ({1 - use.missed / requests:.2%})"
    )
    table.add_row("  at planned offsets", f"{use.hits:,} ({use.hits / requests:.2%})")
    table.add_row("  in free bytes", f"{use.fitted:,} ({use.fitted / requests:.2%})")
    for reason, count in use.displaced.items():
        if count:
            table.add_row(f"not at planned offsets: {reason}", f"{count:,}")
    table.add_row(
        "arena", format_bytes(use.arena_bytes) + _ratio_text(use.arena_bytes, use.lower_bound_bytes, " lower bound")
    )
    table.add_row("peak in use", format_bytes(use.peak_live_bytes))
    if use.reorganisations is not None:
        table.add_row("reorganisations", f"{use.reorganisations:,}")
    return table


def _ratio_text(value: float, base: float, of: str = "") -> str:
    """Ratio of a value to `base` as text to append to the value; empty if `base` is zero."""
    return f" ({value / base:.2f}x{of})" if base else ""
