"""The table of all measured and simulated cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Final

from cells.cell import Result
from cells.methods import METHODS

from pages.comparison import is_settled

_COLUMNS: Final = (
    "results", "device", "model", "layers", "tuning", "attention", "tokens", "method", "status", "settled",
    "step [s]", "tokens/s", "MFU", "device allocated [GiB]", "device reserved [GiB]", "retries", "host process [GiB]",
    "swapped [GiB]", "plan", "memory", "waits, offload [s]", "waits, prefetch [s]", "copies alone [s]", "idle [s]",
    "timed steps", "date", "commit", "command",
)  # fmt: skip


def cells_table(found: Iterable[tuple[str, Iterable[Result]]]) -> str:
    """Returns a CSV table with a row for each cell.

    Waits are times in which the computation waits for the engine's own streams, measured with events. "Copies alone" is
    the time in which the GPU copies to or from the host and computes nothing, measured with the profiler.

    Args:
        found: Results, with the folder from which they come.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for folder, results in found:
        for result in sorted(results, key=_order):
            writer.writerow([folder, *_row(result)])
    return text.getvalue()


def _order(result: Result) -> tuple[str | int, ...]:
    cell = result["cell"]
    layers = cell["layers"] or 1 << 20
    return cell["model"], cell["tuning"], layers, cell["tokens"], list(METHODS).index(cell["method"]), result["date"]


def _row(result: Result) -> list[str | int]:
    cell = result["cell"]
    named = [result.get("device", ""), cell["model"], cell["layers"] or "all", cell["tuning"]]
    named += [cell.get("attention", ""), cell["tokens"], METHODS[cell["method"]].label]
    origin = [result["date"][:10], result.get("commit") or "", result["command"]]
    if result["status"] != "ok" or not result["median_seconds"]:
        return [*named, result["status"], *[""] * (len(_COLUMNS) - len(named) - len(origin) - 2), *origin]
    memory, plan = result["memory"], result["plan"]
    waited = (result["waits"] or {}).get("waited_seconds", {})
    activity = result["activity"] or {}
    return [
        *named, "ok", "yes" if is_settled(result) else "no",
        f"{result['median_seconds']:.3f}", f"{result['tokens_per_second']:.0f}", _rounded(result["mfu"], 3),
        *(_gibibytes(memory.get(f"peak_{name}_bytes")) for name in ("allocated", "reserved")),
        memory["alloc_retries"], _gibibytes(memory["peak_rss_bytes"]), _gibibytes(result["swapped_host_bytes"]),
        _plan(plan), "" if not plan else "planned" if plan["memory_planned"] else "PyTorch's allocator",
        *(_rounded(waited.get(stream), 3) for stream in ("offload", "prefetch")),
        *(_rounded(activity.get(name), 3) for name in ("exposed_copy_seconds", "idle_seconds")),
        len(result["seconds"]), *origin,
    ]  # fmt: skip


def _plan(plan: Result | None) -> str:
    if not plan or plan["mode"] != "memo":
        return str(plan["mode"]) if plan else ""
    # Results of earlier versions have "host_backed" and the order of slices.
    stream, order = plan.get("stream_from_host") or plan["host_backed"], plan.get("schedule")
    parts = [f"alpha {plan['alpha']:.3f}", f"schedule {order}" if order else "", f"on the host: {stream}"]
    return ", ".join(part for part in (parts if stream != "none" else parts[:2]) if part)


def _gibibytes(size_bytes: int | None) -> str:
    return _rounded(None if size_bytes is None else size_bytes / 2**30, 1)


def _rounded(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
