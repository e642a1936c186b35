"""The part of the performance page that needs no GPU: the allocator, the placement planner, and memory by length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_memo.utils.units import format_bytes
from pages.markdown import source, table, tokens

Report = dict[str, Any]
_STATES = {"planned": "a plan is served", "idle": "no plan is active"}


def reserved(report: Report) -> str:
    """Returns the section on what PyTorch's allocator reserves for a step, compared with the planned arena."""
    parts = []
    for row in report["results"]:
        arena = row["arena_bytes"]
        peaks = {
            "the arena alone": arena,
            "with the plan: the arena, and requests outside of it": row["with_plan"]["default"]["peak_reserved_bytes"],
            "PyTorch alone, default settings": row["without_plan"]["default"]["peak_reserved_bytes"],
            "PyTorch alone, expandable segments": row["without_plan"]["expandable_segments"]["peak_reserved_bytes"],
        }
        rows = [[name, format_bytes(size), f"{size / arena:.2f}"] for name, size in peaks.items()]
        bound = "as large as" if arena == row["lower_bound_bytes"] else "larger than"
        step = (
            f"A recorded step (`{row['trace']}`, {row['requests']:,} memory requests) is replayed through PyTorch's "
            f"allocator (torch {report['libc10_cuda']}) on a stub of\nthe CUDA runtime, so no GPU is needed. Here, the "
            f"arena is {bound} the lower bound: the largest number of bytes in use at the\nsame time."
        )
        parts += [step, table(["", "bytes reserved", "relative to the arena"], rows)]
    title = "**Memory that PyTorch's allocator reserves for one step, compared with the planned arena**"
    return "\n\n".join([title, *parts, _told(report)])


def placement(report: Report) -> str:
    """Returns the section on placement problems and the planner's solutions."""
    solved = [row for row in report["results"] if row["status"] == "ok"]
    easy = [row for row in solved if row["one_pass"]["peak"] == row["place"]["peak"] == row["place"]["lower_bound"]]
    rows = [
        [
            row["problem"], f"{row['buffers']:,}", f"{row['place']['peak'] / row['place']['lower_bound']:.3f}",
            f"{row['one_pass']['peak'] / row['place']['lower_bound']:.3f}", f"{row['place']['seconds']:.2f} s",
        ]
        for row in solved
        if row not in easy
    ]  # fmt: skip
    head = ["problem", "buffers", "peak / lower bound", "best of 24 one-pass placements", "time"]
    told = (
        "A to J are hard instances published by google/minimalloc; the search ends when their capacity is met. The\n"
        f"placement planner also meets the lower bound of {len(easy)} recorded layers and models, as one-pass "
        f"placements do, in at most {max((row['place']['seconds'] for row in easy), default=0):.2f} s."
    )
    return "\n\n".join(["**Placement of buffers**, on one core", table(head, rows), told, _told(report)])


def allocation(report: Report) -> str:
    """Returns the section on the time of an allocation and a free, relative to PyTorch's own."""
    spans = {
        name: (min(values), max(values))
        for name in ("planned", "idle")
        for values in [[row["ratio"][name] for row in report["results"]]]
    }
    told = ", ".join(f"{least:.2f} to {most:.2f} while {_STATES[name]}" for name, (least, most) in spans.items())
    sizes = [row["size_bytes"] for row in report["results"]]
    span = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    what = f"**One allocation and one free on the CPU**, {span}, relative to the time of PyTorch's own allocator"
    return f"{what}: {told}.\n\n{_told(report)}"


def growth(report: Report) -> str:
    """Returns the section on device memory by length with all other tensors on the host."""
    lengths = sorted({row["tokens"] for row in report["results"]})
    rows = []
    for level in dict.fromkeys(map(_level, report["results"])):
        found = {row["tokens"]: row for row in report["results"] if _level(row) == level}
        for name, key in (("device", "peak_bytes"), ("host", "host_bytes")):
            sizes = [found[length][key] for length in lengths]
            rows.append([f"{level}, {name}", *map(format_bytes, sizes), f"{sizes[-1] / sizes[0]:.3f}"])
    settings = report["settings"]
    model = f"{settings['layers']} layers of {settings['hidden']}, slices of {settings['slice_tokens']} tokens, fp32"
    return "\n\n".join([
        f"**Peaks of a step by length**: {model}",
        table(["`stream_from_host`", *map(tokens, lengths), "last / first"], rows), _told(report),
    ])  # fmt: skip


def _level(row: Report) -> str:
    """What is on the host in a run. Results of earlier versions name the order of slices instead."""
    return str(row.get("stream_from_host") or {"layer": "hidden", "slice": "model"}[row["schedule"]])


def balance(report: Report) -> str:
    """Returns the section on simulated steps of packed documents that are shared out by length or by cost."""
    rows = [
        [
            str(row["data_parallel"]), str(row["ring"]), f"{row['by_length_seconds']:.2f} s",
            f"{row['by_cost_seconds']:.2f} s", f"{row['ratio']:.2f} x", f"{row['by_length_slowest']:.2f}",
            f"{row['by_cost_slowest']:.2f}",
        ]
        for row in report["results"]
    ]  # fmt: skip
    head = [
        "data parallel",
        "ring",
        "by length",
        "by cost",
        "times as fast",
        "slowest / mean process, by length",
        "by cost",
    ]
    settings = report["settings"]
    what = (
        f"**Steps on packed documents** (*simulated*): {settings['model']} on {settings['cluster']}, "
        f"{settings['documents']:,} documents in {settings['rows']:,} rows of {tokens(settings['seq_len'])} tokens; "
        f"half of the documents have\nat most {settings['median_tokens']:,.0f} tokens, and 99 % at most "
        f"{settings['tokens_of_99_percent']:,.0f}. Both ways train the same rows."
    )
    return "\n\n".join([what, table(head, rows), _told(report)])


def load(path: Path) -> Report:
    """Reads a report.

    Raises:
        ValueError: The file is not a readable report.
    """
    try:
        report: Report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no report of a benchmark can be read ({error})") from None
    return report


def _told(report: Report) -> str:
    return f"({source(report)}.)"
