"""Attention kernels side by side, and a layer with liger-kernel's kernels beside one without: time and memory.

    python benchmarks/kernel_times.py --device cuda
    python benchmarks/kernel_times.py --device cuda --model llama3_8b --lengths 4K 64K --repeats 9
    python benchmarks/kernel_times.py --device cpu --quick

Attention is a forward and a backward on random queries, keys and values with the heads of the model, by every kernel
that computes such calls here, and by a replay of PyTorch's own. A layer is the first one of the model, with random
weights: a forward and a backward on its input, and the bytes that autograd keeps between them beside the weights.
Times are taken in rounds in which everything of one length has its turn, and compared within each round with the first:
PyTorch's own kernel, the layer without liger-kernel. What does not run is a row that says why.

The results are printed, and written to a JSON file, from which benchmarks/performance.py makes docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from arguments import file_name, positive, token_count
from circumstances import circumstances, cpu_name
from kernel_work import Work, attention_works, layer_works
from measure import brief, free_garbage, ratios, spread
from rich.console import Console
from rich.table import Table

from lightning_memo.engine.copies.clock import Clock
from lightning_memo.estimate.inputs.presets import preset_names
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import format_bytes

_RESULTS = Path(__file__).parent / "results" / "kernels"
_TRIED = Path("outputs") / "benchmarks" / "kernels"
_QUICK = ("--model", "llama_tiny", "--lengths", "64", "128", "--repeats", "2")

_STATES = {torch.OutOfMemoryError: "oom", ValueError: "unavailable"}  # a package that is missing, or no GPU for it

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
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
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
        "--dtype", choices=("bfloat16", "float16", "float32"), help="(default: bfloat16; on a CPU fp32)"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="rounds")
    parser.add_argument("--threads", type=positive, default=1, help="that compute, on the CPU")
    parser.add_argument("--quick", action="store_true", help="sizes that take seconds; other sizes still count")
    parser.add_argument("--output", type=Path, help="folder of the JSON file (default: benchmarks/results/kernels, and "
                        "outputs/benchmarks/kernels for a CPU)")  # fmt: skip
    options = parser.parse_args()
    if options.quick:
        options = parser.parse_args([*_QUICK, *sys.argv[1:]])
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.output = options.output or (_TRIED if options.device == "cpu" else _RESULTS)
    return options


def _measured(
    works: Iterator[tuple[str, str, Callable[[], Work]]], tokens: int, repeats: int, device: torch.device
) -> list[Row]:
    """A row for each piece of work at a length, the first of which is what the others are compared with."""
    rows, ready = [], []
    for what, name, make in works:
        row: Row = {"what": what, "name": name, "tokens": tokens, "status": "ok", "reason": "", "kept_bytes": None,
                    "forward_seconds": [], "backward_seconds": []}  # fmt: skip
        rows.append(row)
        if work := _attempt(row, make, device):
            ready.append((row, work))
    for number in range(repeats + 1):
        # There and back again: a machine that slows down steadily must not favour those that come first.
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
    """What comes of it; `None`, and the row says why, if it fails."""
    try:
        return work()
    except Exception as error:
        row["status"] = next((name for kind, name in _STATES.items() if isinstance(error, kind)), "error")
        row["reason"] = brief(error)
    free_garbage(device)
    return None


def _timed(work: Work, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and a backward, by the device's clock."""
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
