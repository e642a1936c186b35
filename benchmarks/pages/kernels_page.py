"""The part of the performance page with attention kernels, and with layers by fused kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_memo.utils.units import format_bytes
from pages.cpu_page import load
from pages.markdown import number, source, table, tokens

Report = dict[str, Any]
Row = dict[str, Any]


def reports(results: Path) -> list[Report]:
    """Reads the reports of all GPUs, in the order of their names.

    Raises:
        ValueError: A file is not a report of benchmarks/kernel_times.py.
    """
    found = []
    for path in sorted((results / "kernels").glob("*.json")):
        report = load(path)
        if not {"device", "settings", "results"} <= report.keys():
            raise ValueError(f"{path}: no report of benchmarks/kernel_times.py; remove it")
        found += [report] if report["settings"]["device"] == "cuda" else []
    return found


def section(report: Report) -> str:
    """Returns the section with the tables of one GPU."""
    settings, rows = report["settings"], report["results"]
    lengths = sorted({row["tokens"] for row in rows})
    of_model = f"with the heads of {settings['model']}, {settings['dtype']}"
    return "\n\n".join([
        f"## Kernels on {report['device']}",
        f"**Attention, causal, forward and backward of one sequence**, {of_model}; in brackets, relative "
        "to\nPyTorch's own",
        _table([row for row in rows if row["what"] == "attention"], lengths, _time),
        f"**A layer of {settings['model']}, forward and backward**; in brackets, relative to the "
        "layer\nas it is in transformers",
        _table([row for row in rows if row["what"] == "layer"], lengths, _time),
        "**Bytes that the layer saves for its backward pass**",
        _table([row for row in rows if row["what"] == "layer"], lengths, _kept),
        f"({source(report)}.)",
    ])  # fmt: skip


def _table(rows: list[Row], lengths: list[int], of: Any) -> str:
    found = {(row["name"], row["tokens"]): row for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    cells = [[name, *[_cell(found.get((name, length)), of) for length in lengths]] for name in names]
    return table(["", *map(tokens, lengths)], cells)


def _cell(row: Row | None, of: Any) -> str:
    if row is None:
        return "-"
    return str(of(row)) if row["status"] == "ok" else str(row["status"])


def _time(row: Row) -> str:
    ratio = row["ratio"] and row["ratio"]["median"]
    return f"{1e3 * row['median_seconds']:.3g} ms ({number(ratio, '{:.3f}')})"


def _kept(row: Row) -> str:
    return format_bytes(row["kept_bytes"])
