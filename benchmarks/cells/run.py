"""Measures cells one after the other, keeps what comes out, and skips what is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from arguments import file_name

from cells.cell import Cell, Effort, Result, finished, load, save
from cells.process import device_name, run_cell

_LEAST_SECONDS = 20.0
"""A cell is not worth starting with less."""


class Run:
    """One command.

    Args:
        output: Folder of the results, with a folder for each device.
        budget_seconds: Of the whole command: a cell that it ends is not kept, unless it had all of it.

    Attributes:
        attempted: Cells that were measured.
        failed: Those of them that ended in an error.
    """

    def __init__(self, output: Path, budget_seconds: float) -> None:
        self.attempted: list[Cell] = []
        self.failed: list[Cell] = []
        self._output = output
        self._ends = time.monotonic() + budget_seconds
        self._devices: dict[str, str] = {}

    def folder(self, device: str) -> Path:
        """Of the results on a device.

        Raises:
            ValueError: There is none.
        """
        if device not in self._devices:
            self._devices[device] = file_name(device_name(device))
        return self._output / self._devices[device]

    def measure(self, cell: Cell, effort: Effort) -> bool:
        """Measure a cell if its result is not there; whether there was time.

        Raises:
            ValueError: There is no such device.
            OSError: The result can't be written.
        """
        folder = self.folder(cell.device)
        if cell in self.attempted or finished(load(folder, cell), effort.seconds):
            return True
        left = self._ends - time.monotonic()
        if left < _LEAST_SECONDS:
            return False
        print(f"{cell.path} ...", end=" ", flush=True)
        result = run_cell(cell, effort, min(effort.seconds, left), sys.argv)
        if result["status"] == "timeout" and left < effort.seconds and self.attempted:
            print("ended: the budget is spent")
            return False
        self.attempted.append(cell)
        if result["status"] == "error":
            self.failed.append(cell)
        save(folder, cell, effort, result)
        print(_line(result), flush=True)
        return True


def _line(result: Result) -> str:
    """What came out, in a few words."""
    if result["status"] != "ok":
        return f"{result['status']}: {result['reason']}"
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    return f"{result['median_seconds']:.3f} s{mfu}, {result['wall_seconds']:.0f} s in all"
