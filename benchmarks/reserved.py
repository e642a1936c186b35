"""Measures what PyTorch's own CUDA allocator reserves for recorded training steps, compared with the planned arena.

    python tests/support/cuda_stub/fetch.py 2.13.0
    python benchmarks/reserved.py step.csv another.csv
    python benchmarks/reserved.py --quick step.csv

No GPU is needed. The traces are files that `Trace.save` wrote. The real libc10_cuda.so of a CUDA build of torch serves
each of them, on a stub of the CUDA runtime, step after step until it reserves no more memory: with default settings,
with expandable_segments:True, and with a plan, where it serves the arena and the requests without a place.
`plan_memory` computes the arena and its lower bound, with offsets that are multiples of 512 bytes. "exact" says whether
the model in lightning_memo/planner/placement/caching_allocator.py gives the same bytes at every request. Parameters,
and everything else that is not in a trace, are not on the device. The results are printed and written to a JSON file.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from circumstances import circumstances, save_report
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memo.artifacts.trace import Trace
from lightning_memo.planner.placement import Placement
from lightning_memo.planner.placement import caching_allocator as caching
from lightning_memo.planner.placement.step_placement import plan_memory
from lightning_memo.utils.units import format_bytes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.cuda_stub.real_allocator import Curves, Replay, replay  # noqa: E402  next to the tests, which use it

_ALIGNMENT = 512
_MOST_STEPS = 12
_QUIET_STEPS = 3
_SETTINGS = {"default": False, "expandable_segments": True}


def main() -> None:
    options = _options()
    version = options.cuda / options.torch / "torch"
    rows = [_measure(path, trace, version, options.seconds) for path, trace in options.traces]
    report = {**_circumstances(options), "results": rows}
    path = options.output / f"{options.name}.json"
    save_report(path, report)
    console = Console()
    console.print(_table(rows, options.torch))
    console.print(f"All numbers: {path}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="CSV files of Trace.save")
    parser.add_argument(
        "--cuda", type=Path, default=ROOT / ".cuda", help="folder that tests/support/cuda_stub/fetch.py created"
    )
    parser.add_argument("--torch", default="2.13.0", help="a fetched version of torch")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit for planning each trace")
    parser.add_argument("--quick", action="store_true", help="plan for one second")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--name", default="reserved", help="name of the JSON file")
    options = parser.parse_args()
    if not (options.cuda / options.torch / "torch" / "complete").exists():
        parser.error(
            f"--torch={options.torch} is not in {options.cuda}: python tests/support/cuda_stub/fetch.py {options.torch}"
        )
    try:
        options.traces = [(path, Trace.load(path)) for path in options.traces]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    options.seconds = 1.0 if options.quick else options.seconds
    return options


def _measure(path: Path, trace: Trace, version: Path, seconds: float) -> dict[str, Any]:
    placement = plan_memory(trace, alignment=_ALIGNMENT, time_limit_seconds=seconds)
    return {
        "trace": path.stem,
        "requests": len(trace),
        "planned_requests": len(trace.planned),
        "lower_bound_bytes": placement.lower_bound_bytes,
        "arena_bytes": placement.peak_bytes,
        "plan": {"method": placement.method, "seconds": round(placement.seconds, 3), "optimal": placement.optimal},
        "without_plan": {name: _without_plan(trace, version, expandable) for name, expandable in _SETTINGS.items()},
        "with_plan": {
            name: _with_plan(trace, placement, version, expandable) for name, expandable in _SETTINGS.items()
        },
    }


def _without_plan(trace: Trace, version: Path, expandable: bool) -> dict[str, Any]:
    """Returns the peaks of the real allocator and of its model."""
    model = caching.replay(trace, expandable=expandable)
    (real,) = replay([Replay(trace, max(model.steps, _MOST_STEPS))], version, expandable=expandable)
    modelled = np.stack([model.allocated_bytes, model.reserved_bytes])
    shown = np.stack([real.allocated[model.steps - 1], real.reserved[model.steps - 1]])
    return {
        **_peaks(real),
        "model": {
            "peak_allocated_bytes": model.peak_allocated_bytes,
            "peak_reserved_bytes": model.peak_reserved_bytes,
            "steps": model.steps,
            "exact": bool(np.array_equal(modelled, shown)),
        },
    }


def _with_plan(trace: Trace, placement: Placement, version: Path, expandable: bool) -> dict[str, Any]:
    """Returns the peaks of the real allocator when it serves the arena first, and then the requests without a place."""
    planned = np.zeros(len(trace), bool)
    planned[trace.planned] = True
    rest = replace(trace, lane=np.where(planned, 1, trace.lane))
    (real,) = replay([Replay(rest, _MOST_STEPS, placement.peak_bytes)], version, expandable=expandable)
    return _peaks(real)


def _peaks(real: Curves) -> dict[str, Any]:
    """Returns the curve of the first step that reserves no more than earlier steps, or of the last step."""
    most = real.reserved.max(axis=1, initial=0)[:_MOST_STEPS]
    quiet = [step for step in range(_QUIET_STEPS, len(most)) if most[step] == most[step - _QUIET_STEPS]]
    step = quiet[0] if quiet else len(most) - 1
    return {
        "peak_allocated_bytes": int(real.allocated[step].max(initial=0)),
        "peak_reserved_bytes": int(most[step]),
        "steps": step + 1,
        "steady": bool(quiet),
        "reserved_bytes_by_step": most.tolist(),
    }


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    return {
        **circumstances(("lightning_memo",)),
        "libc10_cuda": options.torch,
        "device": "none: the stub of the CUDA runtime",
    }


def _table(rows: list[dict[str, Any]], version: str) -> Table:
    grid = Table(title=f"Peak bytes of a step; PyTorch's allocator is that of torch {version}", box=SIMPLE_HEAD)
    grid.add_column("", no_wrap=True)
    for name in ("allocated", "reserved", "x arena", "model"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        arena = row["arena_bytes"]
        grid.add_row(Text(row["trace"], style="bold"))
        grid.add_row("  lower bound", format_bytes(row["lower_bound_bytes"]))
        grid.add_row("  arena", format_bytes(arena))
        for kind, label in (("with_plan", "with the plan"), ("without_plan", "PyTorch alone")):
            for setting, peaks in row[kind].items():
                grid.add_row(f"  {label}, {setting.partition('_')[0]}", *_cells(peaks, arena))
    return grid


def _cells(peaks: dict[str, Any], arena_bytes: int) -> list[str]:
    reserved = peaks["peak_reserved_bytes"]
    model = peaks.get("model")
    return [
        format_bytes(peaks["peak_allocated_bytes"]),
        format_bytes(reserved) + ("" if peaks["steady"] else " and more"),
        _times(reserved, arena_bytes),
        "" if model is None else "exact" if model["exact"] else format_bytes(model["peak_reserved_bytes"]),
    ]


def _times(size_bytes: int, arena_bytes: int) -> str:
    return f"{size_bytes / arena_bytes:.3f}" if arena_bytes else "-"


if __name__ == "__main__":
    main()
