"""Compares this project's strategy with other methods for long sequences on one GPU: time, memory and lengths.

    python benchmarks/gpu.py --models llama3_8b --layers 8 --lengths 4K 64K 128K
    python benchmarks/gpu.py --models llama3_2_1b --tuning full lora --methods checkpointing alst memo_auto_unplanned
    python benchmarks/gpu.py --plan important --budget 560
    python benchmarks/gpu.py --plan longest --models llama3_8b --tuning lora --lengths 32K 1M --multiple-of 32K
    python benchmarks/gpu.py --plan smoke
    python benchmarks/rehearse.py --ranks 8 benchmarks/gpu.py --models llama3_8b --lengths 1M --context ulysses

Each cell, a method at a length, is measured in its own process and saved in a JSON file. Finished cells are not
measured again: if a run was killed or used up its budget, the same command continues it. A method whose package is
missing gives a cell that says so. `--plan smoke` tries everything on a CPU. docs/benchmarks.md explains methods,
measurements and files; benchmarks/performance.py generates docs/performance.md from them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from arguments import token_count
from cells import plans
from cells.cell import Cell, Effort
from cells.longest import next_length
from cells.methods import METHODS
from cells.run import Run

from lightning_memo.estimate.cluster import preset_names

_RESULTS = Path(__file__).parent / "results" / "gpu"
_TRIED = Path("outputs") / "benchmarks"
_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
_LENGTHS = [2**n for n in (12, 14, 16, 17, 18)]


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(options.output, options.budget)
    try:
        for cell, effort in _work(options, run):
            if options.list:
                run.attempted.append(cell)
                print(f"{cell.path}: {effort.warmup} + {effort.repeats} steps, at most {effort.seconds:.0f} s")
            elif not run.measure(cell, effort):
                print("The budget is spent: the same command goes on from here.")
                break
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if run.failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("grid", "longest", "important", "smoke"), default="grid")
    models = preset_names("model")
    parser.add_argument(
        "--models", nargs="+", choices=models, metavar="NAME", default=["llama3_2_1b"], help=str(models)
    )
    parser.add_argument("--layers", type=int, help="number of layers of each model (default: all)")
    parser.add_argument("--tuning", nargs="+", choices=("full", "lora"), default=["full"])
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), metavar="NAME", default=list(plans.MAIN),
                        help=", ".join(METHODS))  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=token_count, default=_LENGTHS, help="tokens, like 65536 or 64K "
                        "(default: 4K to 256K); with --plan longest, the shortest and the longest")  # fmt: skip
    parser.add_argument("--multiple-of", type=token_count, default=8192, help="step of --plan longest")
    parser.add_argument("--bound", action="store_true", help="also measure plain training of 1 and 2 layers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--attention", choices=("sdpa", "cudnn"), default="sdpa", help="attention kernel")
    parser.add_argument("--loss", choices=("chunked", "whole"), default="chunked", help="not for ALST")
    parser.add_argument("--allocator", choices=("native", "expandable_segments"), default="native")
    parser.add_argument("--slice-tokens", type=token_count, default=16384, help="of methods with many slices")
    parser.add_argument("--precision", choices=("bf16-true", "bf16-mixed"), default="bf16-true")
    parser.add_argument("--context", choices=("ring", "ulysses"), default="ring", help="how the ranks of a rehearsal "
                        "divide a sequence")  # fmt: skip
    for name, kind, what in (
        ("warmup", int, "untimed steps"), ("repeats", int, "timed steps"),
        ("time-limit", float, "seconds of a cell"), ("settle", float, "seconds that planning may take"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, help=f"{what} (default: by length)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="time limit of the command in seconds")
    parser.add_argument("--output", type=Path, help="folder of the results (default: benchmarks/results/gpu, and "
                        "outputs/benchmarks on a CPU)")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the cells without measuring")
    options = parser.parse_args()
    if options.plan == "longest" and len(options.lengths) != 2:
        parser.error("--plan longest: give the least and the longest length, like --lengths 32K 1M")
    if options.output is None:
        options.output = _TRIED if options.device == "cpu" or options.plan == "smoke" else _RESULTS
    return options


def _work(options: argparse.Namespace, run: Run) -> Iterator[plans.Work]:
    if options.plan == "important":
        yield from plans.most_important()
    elif options.plan == "smoke":
        yield from plans.smoke()
    elif options.plan == "longest":
        yield from _longest(options, run)
    else:
        bases = list(_bases(options))
        for tokens in sorted(options.lengths):
            for cell, effort in plans.grid(bases, options.methods, [tokens]):
                yield cell, _effort(options, effort)
            for cell, effort in (work for base in bases if options.bound for work in plans.bounds(base, [tokens])):
                yield cell, _effort(options, effort)


def _bases(options: argparse.Namespace) -> Iterator[Cell]:
    """Returns the cells without methods and lengths."""
    for model in options.models:
        for tuning in options.tuning:
            yield Cell(
                method="", tokens=0, model=model, layers=options.layers, tuning=tuning, device=options.device,
                attention=options.attention, loss=options.loss, allocator=options.allocator,
                slice_tokens=options.slice_tokens, ranks=_RANKS, context=options.context, precision=options.precision,
            )  # fmt: skip


def _longest(options: argparse.Namespace, run: Run) -> Iterator[plans.Work]:
    """Yields one length after the other, for each method in turn, depending on the results so far."""
    searches = [replace(base, method=method) for base in _bases(options) for method in options.methods]
    effort = _effort(options, plans.FITS)
    while searches:
        for search in list(searches):
            tokens = next_length(run.folder(search.device), search, *options.lengths, options.multiple_of)
            cell = None if tokens is None else replace(search, tokens=tokens)
            if cell is None or cell in run.attempted:
                searches.remove(search)
            else:
                yield cell, effort


def _effort(options: argparse.Namespace, effort: Effort) -> Effort:
    given = {
        "warmup": options.warmup, "repeats": options.repeats, "seconds": options.time_limit,
        "settle_seconds": options.settle,
    }  # fmt: skip
    return replace(effort, **{name: value for name, value in given.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
