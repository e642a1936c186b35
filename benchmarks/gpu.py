"""This project's strategy beside what else trains long sequences: time, memory and lengths, on one GPU.

    python benchmarks/gpu.py --models llama3_8b --layers 8 --lengths 4K 64K 128K
    python benchmarks/gpu.py --models llama3_2_1b --tuning full lora --methods checkpointing alst memo_auto
    python benchmarks/gpu.py --plan important --budget 560
    python benchmarks/gpu.py --plan longest --models llama3_8b --tuning lora --lengths 32K 1M --multiple-of 32K
    python benchmarks/gpu.py --plan smoke

Each cell, a method at a length, is measured in a process of its own and kept in a JSON file. Cells that are finished
are not measured again: a run that was killed, or whose budget was spent, goes on where it ended when the same command
runs again. Methods of packages that are missing are cells that say so. `--plan smoke` tries all of it on a CPU.
docs/benchmarks.md explains methods, measures and files; benchmarks/performance.py makes docs/performance.md of them.
"""

from __future__ import annotations

import argparse
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

from lightning_memo.estimate.inputs.presets import preset_names

_RESULTS = Path(__file__).parent / "results" / "gpu"
_TRIED = Path("outputs") / "benchmarks"
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
    parser.add_argument("--layers", type=int, help="of each model, the first ones (default: all)")
    parser.add_argument("--tuning", nargs="+", choices=("full", "lora"), default=["full"])
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), metavar="NAME", default=list(plans.MAIN),
                        help=", ".join(METHODS))  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=token_count, default=_LENGTHS, help="tokens, like 65536 or 64K "
                        "(default: 4K to 256K); with --plan longest the least and the longest")  # fmt: skip
    parser.add_argument("--multiple-of", type=token_count, default=8192, help="lengths of --plan longest")
    parser.add_argument("--bound", action="store_true", help="also measure plain training of 1 and 2 layers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--attention", choices=("sdpa", "cudnn"), default="sdpa", help="kernel of all methods")
    parser.add_argument("--loss", choices=("chunked", "whole"), default="chunked", help="of all methods but ALST's own")
    parser.add_argument("--allocator", choices=("native", "expandable_segments"), default="native")
    parser.add_argument("--slice-tokens", type=token_count, default=16384, help="of the methods with many slices")
    for name, kind, what in (
        ("warmup", int, "untimed steps"), ("repeats", int, "timed steps"),
        ("time-limit", float, "seconds of a cell"), ("settle", float, "seconds that planning may take"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, help=f"{what} (default: by length)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of the whole command")
    parser.add_argument("--output", type=Path, help="folder of the results (default: benchmarks/results/gpu, and "
                        "outputs/benchmarks for those of a CPU)")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the cells, and measure nothing")
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
    """The cells without methods and lengths."""
    for model in options.models:
        for tuning in options.tuning:
            yield Cell(
                method="", tokens=0, model=model, layers=options.layers, tuning=tuning, device=options.device,
                attention=options.attention, loss=options.loss, allocator=options.allocator,
                slice_tokens=options.slice_tokens,
            )  # fmt: skip


def _longest(options: argparse.Namespace, run: Run) -> Iterator[plans.Work]:
    """One length after the other, for each method in turn, by what was found so far."""
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
