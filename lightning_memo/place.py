"""Command line `python -m lightning_memo.place IN.csv OUT.csv`: plans the addresses of buffers."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from lightning_memo.cli.processes import finish_imports, prepare_process

    prepare_process()

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from lightning_memo.planner.placement import Placement, Progress, place
from lightning_memo.planner.placement.csv_tables import ProblemTable, read_problem
from lightning_memo.planner.placement.placement_core import load_library
from lightning_memo.utils.files import replacing
from lightning_memo.utils.native_build import BuildError
from lightning_memo.utils.units import format_bytes, parse_bytes

FITS, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2
"""Exit status of the command."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see python -m lightning_memo.place --help)")


def main(arguments: list[str] | None = None) -> int:
    """Places the buffers of a CSV file.

    Args:
        arguments: Arguments of the command line, or None for those in `sys.argv`.

    Returns:
        The exit status: 0 if the placement fits the capacity, 1 if it does not, and 2 after bad input, which is
        reported in one line on stderr.
    """
    try:
        options = _parser().parse_args(arguments)
        table = read_problem(options.input, options.alignment)
        with _new_file(options.output) as unfinished:
            placement = _place(table, options)
            with unfinished.open("w", newline="", encoding="utf-8") as file:
                table.write(file, placement)
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        return _refuse(str(error))
    _print_result(placement, options.capacity)
    fits = options.capacity is None or placement.peak_bytes <= options.capacity
    return FITS if fits else DOES_NOT_FIT


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)  # noqa: T201
    return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m lightning_memo.place",
        description="Assigns an offset to each buffer so that buffers with overlapping lifetimes do not overlap in "
        "memory, with the lowest peak that is found.",
    )
    parser.add_argument(
        "input", type=Path, help="CSV file with columns id,lower,upper,size; a buffer lives in [lower, upper)"
    )
    parser.add_argument("output", type=Path, help="CSV file to write: the input with an additional column offset")
    parser.add_argument(
        "--capacity",
        type=_option(parse_bytes),
        help='peak that is low enough, for example 1048576 or "1MiB"',
    )
    parser.add_argument(
        "--time-limit", type=_option(_seconds), default=60.0, help="time limit in seconds (default: 60)"
    )
    parser.add_argument(
        "--alignment", type=_option(parse_bytes), default=1, help="alignment of offsets in bytes (default: 1)"
    )
    return parser


def _option(read: Callable[[str], float]) -> Callable[[str], float]:
    """Makes argparse print the message of a `ValueError`, which it otherwise hides."""

    def convert(text: str) -> float:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError(f"{text} is not a valid time: give a number of seconds above 0")
    return seconds


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yields a file that replaces `path` at the end. Fails before the work if the file cannot be written."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file")
    with replacing(path) as unfinished:
        unfinished.touch()
        yield unfinished


def _place(table: ProblemTable, options: argparse.Namespace) -> Placement:
    console = Console(stderr=True)
    try:
        load_library()
    except BuildError as error:
        console.print(
            f"The C++ search is not available ({error}). Using one-pass placements, and HiGHS for small problems.",
            style="yellow",
            soft_wrap=True,
        )
    with console.status("placing ...") as status:

        def show(progress: Progress) -> None:
            status.update(
                f"{progress.stage}: peak {progress.peak_bytes:,}, lower bound {progress.lower_bound_bytes:,}, "
                f"{progress.seconds:.0f} s"
            )

        return place(
            table.problem,
            capacity_bytes=options.capacity,
            time_limit_seconds=options.time_limit,
            progress=show,
        )


def _print_result(placement: Placement, capacity_bytes: int | None) -> None:
    proven = "yes" if placement.optimal else f"not proven, {placement.gap:.2%} above the lower bound"
    lines = [
        f"peak         {placement.peak_bytes} bytes ({format_bytes(placement.peak_bytes)})",
        f"lower bound  {placement.lower_bound_bytes} bytes",
        f"optimal      {proven}",
        f"found by     {placement.method}",
        f"seconds      {placement.seconds:.3f}",
    ]
    if capacity_bytes is not None:
        fits = "fits" if placement.peak_bytes <= capacity_bytes else "does not fit"
        lines.append(f"capacity     {capacity_bytes} bytes: {fits}")
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    finish_imports()
    sys.exit(main())
