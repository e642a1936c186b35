"""Placement problems as CSV files: `id,lower,upper,size` as input, the same with `offset` as output."""

from __future__ import annotations

import csv
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from lightning_memo.planner.placement.problem import Placement, Problem

COLUMNS: Final = ("id", "lower", "upper", "size")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,4000}", re.ASCII)


@dataclass(frozen=True)
class ProblemTable:
    """A problem that was read from a file, with all columns of the file."""

    problem: Problem
    header: list[str]
    rows: list[list[str]]

    def write(self, file: TextIO, placement: Placement) -> None:
        """Write the table with the offsets in bytes as its last column, replacing an existing column `offset`.

        Args:
            file: Text file to write to.
            placement: Offsets of the buffers.
        """
        preserved = [place for place, name in enumerate(self.header) if name != "offset"]
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(self.header[place] for place in preserved), "offset"])
        for row, offset in zip(self.rows, placement.offset.tolist(), strict=True):
            writer.writerow([*(row[place] for place in preserved), offset])


def read_problem(path: str | os.PathLike[str], alignment: int = 1) -> ProblemTable:
    """Read a problem.

    Args:
        path: A CSV file with the columns `id`, `lower`, `upper` and `size` in any order. Other columns are preserved.
        alignment: Bytes that offsets are multiples of.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not such a table. The message is one line that names file, line and column.
    """
    try:
        # The csv module handles newlines. utf-8-sig removes the byte order mark that spreadsheets write.
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(header)
            lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
        return _table(header, lines, alignment)
    except UnicodeDecodeError:
        raise ValueError(f"{os.fspath(path)}: not text: give a CSV file with the columns {','.join(COLUMNS)}") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _check_header(header: list[str]) -> None:
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        found = ",".join(header)[:60] or "nothing"
        raise ValueError(
            f"column {' and '.join(missing)} missing: the first line must name {','.join(COLUMNS)}, it is {found!r}"
        )
    for name in COLUMNS:
        if header.count(name) > 1:
            raise ValueError(f"column {name} is there {header.count(name)} times: give it once")


def _table(header: list[str], lines: list[tuple[int, list[str]]], alignment: int) -> ProblemTable:
    values: dict[str, list[int]] = {name: [] for name in COLUMNS[1:]}
    ids: dict[str, int] = {}
    places = {name: header.index(name) for name in COLUMNS}
    for line, row in lines:
        if len(row) != len(header):
            raise ValueError(f"line {line}: {len(row)} values for {len(header)} columns")
        own = row[places["id"]].strip()
        if own in ids:
            raise ValueError(f"line {line}: id {own[:60]!r} is already in line {ids[own]}: ids must differ")
        ids[own] = line
        number = {name: _integer(row[places[name]], name, line) for name in values}
        if number["upper"] <= number["lower"]:
            raise ValueError(
                f"line {line}: upper={number['upper']} must be above lower={number['lower']}: a buffer dies after its "
                "birth"
            )
        if number["size"] < 0:
            raise ValueError(f"line {line}: size={number['size']} must be at least 0 bytes")
        for name, value in number.items():
            values[name].append(value)
    lower, upper, size = (np.array(value, np.int64) for value in values.values())
    problem = Problem(lower=lower, upper=upper, size=size, alignment=alignment)
    return ProblemTable(problem, header, [row for _, row in lines])


def _integer(text: str, name: str, line: int) -> int:
    text = text.strip()
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"line {line}: {name}={text[:60]!r} is not an integer")
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"line {line}: {name}={text[:60]} does not fit 64 bits")
    return value
