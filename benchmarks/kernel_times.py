"""Compares attention kernels, and a layer as it is, by `fused_kernels` and by liger-kernel: time and memory.

    python benchmarks/kernel_times.py --device cuda
    python benchmarks/kernel_times.py --device cuda --model llama3_8b --lengths 4K 64K --repeats 9
    python benchmarks/kernel_times.py --device cpu --quick

Attention is a forward and a backward pass on random queries, keys and values with the heads of the model, for every
available kernel and for a replay of PyTorch's own. A layer is the first layer of the model with random weights: a
forward and a backward pass on its input, and the bytes that autograd saves between them in addition to the weights.
Each round measures everything of one length and compares it with the first candidate: PyTorch's own kernel, or the
layer as it is in transformers. A candidate that does not run is a row that says why.

The results are printed and written to a JSON file, from which benchmarks/performance.py generates docs/performance.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from arguments import file_name, positive, token_count
from circumstances import circumstances, cpu_name, save_report
from kernel_work import Work, attention_works, layer_works
from measure import brief, free_garbage, ratios, spread
from rich.console import Console
from rich.table import Table

from lightning_memo.engine.timeline_recorder import Clock
from lightning_memo.estimate.cluster import preset_names
from lightning_memo.utils.units import format_bytes

_RESULTS = Path(__file__).parent / "results" / "kernels"
_TRIED = Path("outputs") / "benchmarks" / "kernels"
_QUICK = ("--model", "llama_tiny", "--lengths", "64", "128", "--repeats", "2")

_STATES = {torch.OutOfMemoryError: "oom", ValueError: "unavailable"}  # a package is missing, or there is no GPU for it

Row = dict[str, Any]


def main() -> int:
    options = _options()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("--device cuda: PyTorch finds no GPU; --device cpu --quick tries things out", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
    rows: list[Row] = []
    for works_of in (attention_works, layer_works):
        for tokens in options.lengths:
            works = works_of(options.model, tokens, getattr(torch, options.dtype), device)
            rows += _measured(works, tokens, options.repeats, device)
    report = {
        **circumstances(("torch", "transformers", "triton", "liger-kernel", "flash-attn", "transformer-engine")),
        "device": name,
        "settings": {key: getattr(options, key) for key in ("device", "model", "lengths", "dtype", "repeats")},
        "results": rows,
    }
    path = options.output / f"{file_name(name)}.json"
    save_report(path, report)
    _show(rows, f"{options.model}, {options.dtype}: {name}")
    Console().print(f"Samples: {path}", highlight=False, soft_wrap=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = preset_names("model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=models, metavar="NAME", default="llama3_8b", help=", ".join(models))
    parser.add_argument("--lengths", nargs="+", type=token_count, default=[2**n for n in (12, 14, 16)])
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="dtype (default: bfloat16; float32 on a CPU)"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="rounds")
    parser.add_argument("--threads", type=positive, default=1, help="number of compute threads on the CPU")
    parser.add_argument("--quick", action="store_true", help="sizes that take seconds; other options override them")
    parser.add_argument("--output", type=Path, help="folder of the JSON file (default: benchmarks/results/kernels, and "
                        "outputs/benchmarks/kernels on a CPU)")  # fmt: skip
    options = parser.parse_args()
    if options.quick:
        options = parser.parse_args([*_QUICK, *sys.argv[1:]])
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.output = options.output or (_TRIED if options.device == "cpu" else _RESULTS)
    return options


def _measured(
    works: Iterator[tuple[str, str, Callable[[], Work]]], tokens: int, repeats: int, device: torch.device
) -> list[Row]:
    """Returns a row for each candidate at a length; the others are compared with the first one."""
    rows, ready = [], []
    for what, name, make in works:
        row: Row = {"what": what, "name": name, "tokens": tokens, "status": "ok", "reason": "", "kept_bytes": None,
                    "forward_seconds": [], "backward_seconds": []}  # fmt: skip
        rows.append(row)
        if work := _attempt(row, make, device):
            ready.append((row, work))
    for number in range(repeats + 1):
        # The order alternates, because a machine that slows down steadily must not favour those that come first.
        for row, work in ready if number % 2 == 0 else reversed(ready):
            if row["status"] != "ok":
                continue
            seconds = _attempt(row, lambda work=work: _timed(work, device), device)
            if number and seconds:  # the first turn warms up
                row["forward_seconds"].append(seconds[0])
                row["backward_seconds"].append(seconds[1])
            elif seconds:
                row["kept_bytes"] = work.kept_bytes
    for row in rows:
        row["seconds"] = [sum(both) for both in zip(row["forward_seconds"], row["backward_seconds"], strict=True)]
        row["median_seconds"] = median(row["seconds"]) if row["seconds"] else None
        row["ratio"] = spread(ratios(row["seconds"], rows[0]["seconds"]))
    return rows


def _attempt(row: Row, work: Callable[[], Any], device: torch.device) -> Any:
    """Runs a measurement. If it fails, returns `None` and puts the reason into the row."""
    try:
        return work()
    except Exception as error:
        row["status"] = next((name for kind, name in _STATES.items() if isinstance(error, kind)), "error")
        row["reason"] = brief(error)
    free_garbage(device)
    return None


def _timed(work: Work, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of a forward and a backward pass, by the clock of the device."""
    clock = Clock(device)
    begun = clock.now()
    work.forward()
    between = clock.now()
    work.backward()
    ended = clock.now()
    return Clock.seconds(begun, between), Clock.seconds(between, ended)


def _show(rows: list[Row], title: str) -> None:
    table = Table("", "tokens", "forward", "backward", "x the first", "kept", title=title)
    for row in rows:
        table.add_row(
            f"{row['what']}, {row['name']}",
            f"{row['tokens']:,}",
            _milliseconds(row["forward_seconds"]),
            _milliseconds(row["backward_seconds"]),
            "-" if row["ratio"] is None else f"{row['ratio']['median']:.3f}",
            "-" if row["kept_bytes"] is None else format_bytes(row["kept_bytes"]),
        )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(
                f"{row['what']}, {row['name']} at {row['tokens']:,}: {row['reason']}", highlight=False, markup=False
            )


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.3f} ms" if seconds else "-"


if __name__ == "__main__":
    sys.exit(main())
