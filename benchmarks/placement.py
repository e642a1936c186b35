"""Measures peaks and times of `place`, of single one-pass placements, and of MiniMalloc.

    python benchmarks/placement.py FOLDER
    python benchmarks/placement.py FOLDER --time-limit 20 --minimalloc path/to/minimalloc
    python benchmarks/placement.py FOLDER --quick

FOLDER contains problems as CSV files with the columns id, lower, upper and size: a buffer of `size` bytes lives during
[lower, upper). A number before the extension, as in NAME.CAPACITY.csv, is the capacity: all lower peaks are equally
good, and `place` and MiniMalloc may stop when they fit. Without a capacity, `place` minimizes the peak, and MiniMalloc,
which only decides whether a capacity is enough, is given the peak that `place` found.

The best of the one-pass placements is the result of a greedy planner that tries all of their orders.

The results are printed and written to a JSON file.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from circumstances import circumstances, cpu_name, save_report
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lightning_memo.planner.placement import Placement, Problem, mip, place, validate
from lightning_memo.planner.placement.csv_tables import ProblemTable, read_problem
from lightning_memo.planner.placement.placement_core import available_library, load_library, opened
from lightning_memo.planner.placement.problem import section
from lightning_memo.utils.native_build import BuildError

_RESULTS = Path(__file__).parent / "results"
_CAPACITY = re.compile(r".+\.([0-9]{1,18})\.csv")
_QUICK_SECONDS = 1.0
_MINIMALLOC_GRACE_SECONDS = 30.0
_TABLE_WIDTH = 130

Row = dict[str, Any]  # a result in the form of the JSON file


def main() -> None:
    options = _options()
    report = _circumstances(options)
    report["results"] = rows = _measure(options)
    path = options.output / f"{options.name}.json"
    save_report(path, report)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table(rows, f"Placements in at most {options.time_limit:g} s each: {report['device']}"))
    console.print(f"Results: {path}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the problems")
    parser.add_argument("--minimalloc", type=Path, metavar="BINARY", help="MiniMalloc's program, for comparison")
    parser.add_argument("--time-limit", type=_seconds, default=60.0, metavar="S", help="seconds per problem")
    parser.add_argument("--quick", action="store_true", help=f"at most {_QUICK_SECONDS:g} s per problem: a first look")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the JSON file")
    parser.add_argument("--name", help="name of the JSON file (default: placement-FOLDER)")
    options = parser.parse_args()
    if options.quick:
        options.time_limit = min(options.time_limit, _QUICK_SECONDS)
    options.problems = sorted(options.folder.glob("*.csv"))
    if not options.problems:
        parser.error(f"{options.folder}: no CSV files there")
    if options.minimalloc is not None and not options.minimalloc.is_file():
        parser.error(f"--minimalloc {options.minimalloc}: no such file")
    options.name = options.name or f"placement-{options.folder.resolve().name}"
    return options


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return seconds


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the values that the numbers depend on."""
    return {
        **circumstances(("lightning_memo", "numpy", "highspy")),
        "device": cpu_name(),
        "compiled": _is_compiled(),
        "time_limit": options.time_limit,
    }


def _is_compiled() -> bool:
    """Returns whether the C++ search is available. It is compiled here, so no measurement includes the compilation."""
    try:
        load_library()
    except BuildError as error:
        print(f"without the C++ search: {error}", file=sys.stderr)
        return False
    return True


def _measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(options.problems))
        for path in options.problems:
            progress.update(task, description=path.name)
            rows.append(_row(path, options))
            progress.advance(task)
    return rows


def _row(path: Path, options: argparse.Namespace) -> Row:
    """Returns all results for one problem, or the reason why it cannot be read."""
    row: Row = {"problem": path.stem, "status": "ok"}
    try:
        read = read_problem(path)
    except (ValueError, OSError) as error:
        return {**row, "status": str(error)}
    match = _CAPACITY.fullmatch(path.name)
    capacity = int(match[1]) if match else None
    placement = place(read.problem, capacity_bytes=capacity, time_limit_seconds=options.time_limit)
    row |= {
        "problem": path.name[: match.start(1) - 1] if match else path.stem,
        "buffers": len(read.problem),
        "capacity": capacity,
        "largest_load": read.problem.lower_bound_bytes,
        "place": {
            "peak": placement.peak_bytes,
            "lower_bound": placement.lower_bound_bytes,
            "optimal": placement.optimal,
            "fits": capacity is None or placement.peak_bytes <= capacity,
            "method": placement.method,
            "seconds": placement.seconds,
        },
        "one_pass": one_pass(read.problem),
        "minimalloc": None,
    }
    if options.minimalloc is not None:
        asked = placement.peak_bytes if capacity is None else capacity
        row["minimalloc"] = asdict(minimalloc(options.minimalloc, path, read, asked, options.time_limit))
    return row


def one_pass(problem: Problem) -> Row | None:
    """Returns the peak of each single one-pass placement, and the best one; None if there is nothing to place."""
    solid = problem.subset((problem.size > 0).nonzero()[0])
    if not len(solid):
        return None
    sectioned = section(solid)
    start = time.perf_counter()
    with opened(sectioned, available_library()) as core:
        peaks = {
            name: int((offset + sectioned.size).max()) * sectioned.unit_bytes
            for name, offset in mip.placements(sectioned, core)
        }
    seconds = time.perf_counter() - start
    best = min(peaks, key=lambda name: peaks[name])
    return {"best": best, "peak": peaks[best], "seconds": seconds, "peaks": peaks}


@dataclass(frozen=True, kw_only=True)
class MiniMalloc:
    """MiniMalloc's result for one problem."""

    capacity: int
    """The capacity that it was given."""

    seconds: float
    peak: int | None = None
    status: str = "ok"


def minimalloc(program: Path, path: Path, read: ProblemTable, capacity: int, time_limit: float) -> MiniMalloc:
    """Runs MiniMalloc's program on a problem, and checks its placement.

    Args:
        program: Path of its binary.
        path: Path of the problem.
        read: The problem itself.
        capacity: The capacity to fit in.
        time_limit: Seconds after which it gives up.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "placed.csv"
        arguments = (f"--capacity={capacity}", f"--input={path}", f"--output={output}", f"--timeout={time_limit:g}s")
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [program.resolve(), *arguments], capture_output=True, text=True, errors="replace", check=False,
                timeout=time_limit + _MINIMALLOC_GRACE_SECONDS,
            )  # fmt: skip
            seconds = time.perf_counter() - start
            if done.returncode:
                last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2][:100]
                raise ValueError(f"no placement, exit status {done.returncode}{f': {last}' if last else ''}")
            peak = _peak_of(output, read, capacity)
        except subprocess.TimeoutExpired:
            seconds, status = time.perf_counter() - start, f"stopped, it went on beyond its {time_limit:g} s"
        except OSError as error:
            seconds, status = time.perf_counter() - start, f"failed: {error.strerror}"
        except ValueError as error:
            status = str(error)
        else:
            return MiniMalloc(capacity=capacity, seconds=seconds, peak=peak)
    return MiniMalloc(capacity=capacity, seconds=seconds, status=status)


def _peak_of(output: Path, read: ProblemTable, capacity: int) -> int:
    """Returns the peak of a placement in a file, after validating it."""
    place_of_id = read.header.index("id")
    try:
        with output.open(newline="", encoding="utf-8") as file:
            offsets = {row["id"].strip(): int(row["offset"]) for row in csv.DictReader(file)}
        offset = read.problem.lower * 0
        offset[:] = [offsets[row[place_of_id].strip()] for row in read.rows]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"its output can't be read ({type(error).__name__}: {error})") from None
    peak = int((offset + read.problem.size).max(initial=0))
    placement = Placement(offset=offset, peak_bytes=peak, lower_bound_bytes=0, method="MiniMalloc", seconds=0.0)
    findings = validate(read.problem, placement, capacity)
    if findings:
        raise ValueError(f"its placement is wrong: {findings[0]}")
    return peak


def table(rows: list[Row], title: str) -> Table:
    """Returns a table with one row per problem, and below it the failures."""
    compared = any(row.get("minimalloc") for row in rows)
    grid = Table(title=Text(title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    grid.add_column("problem", no_wrap=True)
    names = ["buffers", "capacity", "lower bound", "peak", "above", "fits", "time", "best one-pass", "above", "which"]
    for name in (*names, *(("MiniMalloc", "time") if compared else ())):
        grid.add_column(name, justify="right", no_wrap=True)
    notes = []
    for row in rows:
        grid.add_row(Text(row["problem"]), *(_cells(row, compared) if row["status"] == "ok" else ()))
        if row["status"] != "ok":
            notes.append(f"{row['problem']}: {row['status']}")
        elif (other := row["minimalloc"]) and other["status"] != "ok":
            notes.append(f"{row['problem']}: MiniMalloc: {other['status']}")
    grid.caption = Text("\n".join(notes)) if notes else None
    return grid


def _cells(row: Row, compared: bool) -> list[str]:
    ours, greedy, other = row["place"], row["one_pass"], row["minimalloc"]
    fits = "-" if row["capacity"] is None else "yes" if ours["fits"] else "no"
    cells = [
        f"{row['buffers']}",
        _bytes(row["capacity"]),
        _bytes(ours["lower_bound"]),
        _bytes(ours["peak"]),
        _above(ours["peak"], ours["lower_bound"]),
        fits,
        f"{ours['seconds']:.2f} s",
        _bytes(greedy and greedy["peak"]),
        _above(greedy and greedy["peak"], ours["lower_bound"]),
        greedy["best"] if greedy else "-",
    ]
    return [*cells, *((_bytes(other["peak"]), f"{other['seconds']:.2f} s") if compared and other else ())]


def _bytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes:,}"


def _above(peak: int | None, bound: int) -> str:
    return "-" if not peak or not bound else f"{peak / bound - 1:.2%}"


if __name__ == "__main__":
    main()
