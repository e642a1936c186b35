"""Times one allocation and one free on the CPU with the planned allocator and with PyTorch's own.

    python benchmarks/allocator.py
    python benchmarks/allocator.py --quick

The times are measured in C++, in one thread, through PyTorch's allocator interface. Each round measures three variants:
"native" is PyTorch's allocator alone; "idle" has the planned allocator in front of it, which passes every request on;
"planned" serves every request from its arena. The table has the medians, and the medians of the ratios within a round.
Blocks are not written to. The results are printed and written to a JSON file with all samples.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from circumstances import circumstances, save_report
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_memo.allocator import PlannedAllocator
from lightning_memo.allocator.planned_allocator import AllocatorLibrary
from lightning_memo.utils import native_build as native

_KIB = 1024
_CASES = [(size * _KIB, live) for size in (4, 64, 256, 1024, 8192) for live in (1, 16, 256)]
_QUICK_CASES = [(256 * _KIB, 16)]
_WAYS = ("native", "idle", "planned")
_SLOTS = 256  # requests per phase
_RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _options()
    timer = _Timer(phases=8 if options.quick else 80)
    cases = _QUICK_CASES if options.quick else _CASES
    report = {
        **circumstances(("torch", "lightning_memo")),
        "results": [timer.measure(size, live, options.repeats) for size, live in cases],
    }
    path = options.output / f"{options.name}.json"
    save_report(path, report)
    console = Console()
    console.print(_table(report["results"]))
    console.print(f"Samples: {path}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, few requests")
    parser.add_argument("--repeats", type=int, default=11, help="rounds, at least 1")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the JSON file")
    parser.add_argument("--name", default="allocator", help="name of the JSON file")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats={options.repeats}: give 1 or more")
    return options


class _Timer:
    """Times requests with the three variants.

    Args:
        phases: How often a phase of requests is repeated for one sample.
    """

    def __init__(self, phases: int) -> None:
        self._phases = phases
        self._allocator = PlannedAllocator(torch.device("cpu"))
        functions = {"time_requests": (ctypes.c_double, *[ctypes.c_int64] * 4, ctypes.c_void_p)}
        source = Path(__file__).with_suffix(".cpp")
        self._time = native.load("allocator_benchmark", [source], functions, native.torch_flags()).time_requests
        self._mark = ctypes.cast(AllocatorLibrary("cpu").phase, ctypes.c_void_p)

    def measure(self, size_bytes: int, live: int, repeats: int) -> dict[str, Any]:
        """Returns nanoseconds of one allocation and one free, with one sample per round for each variant."""
        self._sample("native", size_bytes, live)
        samples: dict[str, list[float]] = {way: [] for way in _WAYS}
        for number in range(repeats):
            # The order alternates, because a machine that slows down steadily must not favour those that come first.
            for way in _WAYS if number % 2 == 0 else reversed(_WAYS):
                samples[way].append(self._sample(way, size_bytes, live))
        ratios = {
            way: median(one / base for one, base in zip(samples[way], samples["native"], strict=True)) for way in _WAYS
        }
        return {
            "size_bytes": size_bytes,
            "live": live,
            "median_ns": {way: median(values) for way, values in samples.items()},
            "ratio": ratios,
            "ns": samples,
        }

    def _sample(self, way: str, size_bytes: int, live: int) -> float:
        if way == "native":
            return self._time(self._phases, _SLOTS, live, size_bytes, None)
        self._allocator.install()
        try:
            if way == "planned":
                offsets = np.arange(_SLOTS) % live * size_bytes
                self._allocator.serve([(np.full(_SLOTS, size_bytes), offsets)], live * size_bytes, min_bytes=1)
            self._allocator.reset_stats()
            ns = self._time(self._phases, _SLOTS, live, size_bytes, self._mark if way == "planned" else None)
            hits = self._allocator.stats().hits
            assert hits == (self._phases * _SLOTS if way == "planned" else 0), hits
        finally:
            self._allocator.leave()
            self._allocator.uninstall()
        return ns


def _table(rows: list[dict[str, Any]]) -> Table:
    grid = Table(title="ns for one allocation and one free", box=SIMPLE_HEAD)
    for name in ("block", "live", *_WAYS, "idle / native", "planned / native"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times = [f"{row['median_ns'][way]:.0f}" for way in _WAYS]
        ratios = [f"{row['ratio'][way]:.2f}" for way in ("idle", "planned")]
        grid.add_row(f"{row['size_bytes'] // _KIB} KiB", str(row["live"]), *times, *ratios)
    return grid


if __name__ == "__main__":
    main()
