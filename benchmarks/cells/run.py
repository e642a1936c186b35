"""Measures cells one after the other, saves their results, and skips cells that have one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from arguments import file_name

from cells.cell import Cell, Effort, Result, finished, load, save
from cells.process import device_name, run_cell

_LEAST_SECONDS = 20.0
"""Shortest remaining time in seconds for which another cell is started."""


class Run:
    """The cells of one command.

    Args:
        output: Folder of the results, with a folder for each device.
        budget_seconds: Time for the whole command. A cell that is interrupted by it is not saved, unless it had all of
            it.

    Attributes:
        attempted: Number of cells that were measured.
        failed: Number of measured cells that ended with an error.
    """

    def __init__(self, output: Path, budget_seconds: float) -> None:
        self.attempted: list[Cell] = []
        self.failed: list[Cell] = []
        self._output = output
        self._ends = time.monotonic() + budget_seconds
        self._devices: dict[str, str] = {}

    def folder(self, device: str) -> Path:
        """Returns the folder of the results on a device.

        Raises:
            ValueError: There is no such device.
        """
        if device not in self._devices:
            self._devices[device] = file_name(device_name(device))
        return self._output / self._devices[device]

    def measure(self, cell: Cell, effort: Effort) -> bool:
        """Measures a cell if it has no result, and returns whether there was time.

        Raises:
            ValueError: There is no such device.
            OSError: The result cannot be written.
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
    """Returns a short summary of a result."""
    if result["status"] != "ok":
        return f"{result['status']}: {result['reason']}"
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    return f"{result['median_seconds']:.3f} s{mfu}, {result['wall_seconds']:.0f} s in all"
