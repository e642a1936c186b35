"""The papers' tables, each with its cells and a summary of its errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

import paper_cells
import paper_runs
from paper_cells import Cell

_MEASURES: Final = {"mfu_pct": "MFU", "tgs": "tokens per GPU and second", "wall_s": "seconds of a step"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table of a paper, with its cells."""

    title: str
    cells: Sequence[Cell]
    unit: str = ""
    """Unit of the errors; "%" means a percentage of the paper's numbers."""

    others: Sequence[float] = ()
    """Numbers of the paper's column that are not estimated; they count for its mean."""

    part: bool = False
    """Whether another section has the same cells."""

    @property
    def numbers(self) -> list[Cell]:
        """Cells in which both the paper and the estimate have a number."""
        return [cell for cell in self.cells if isinstance(cell.paper, float) and isinstance(cell.ours, float)]

    @property
    def words(self) -> list[Cell]:
        """All other cells, whose answers are equal or not."""
        return [cell for cell in self.cells if not (isinstance(cell.paper, float) and isinstance(cell.ours, float))]

    def error(self, cell: Cell) -> float:
        """Returns our number minus the paper's, in the unit of the section."""
        return self._above(cell, cell.ours)

    def trivial_error(self, cell: Cell) -> float:
        """Returns the error of the trivial guess, the mean of the paper's column."""
        column = [c.paper for c in self.cells if isinstance(c.paper, float)]
        return self._above(cell, fmean([*column, *self.others]))

    @property
    def mean_error(self) -> float:
        return fmean(abs(self.error(cell)) for cell in self.numbers)

    @property
    def mean_trivial_error(self) -> float:
        return fmean(abs(self.trivial_error(cell)) for cell in self.numbers)

    @property
    def same(self) -> int:
        return sum(cell.paper == cell.ours for cell in self.words)

    def _above(self, cell: Cell, guess: float) -> float:
        return 100 * (guess / cell.paper - 1) if self.unit == "%" else guess - float(cell.paper)


def sections() -> Iterator[Section]:
    """Yields all tables."""
    yield Section(title="ZeRO, table 1: the model's state on a GPU", cells=paper_cells.zero_table(), unit="GB")
    yield from _table3()
    yield from _table4()
    sweep = [c.cell for c in paper_cells.table5()]
    yield Section(title="MEMO, table 5: MFU by alpha", cells=sweep, unit="points")
    yield Section(title="MEMO, table 5: best alpha of each length", cells=best_alphas(sweep))
    alphas, of_program = paper_cells.alphas(), paper_cells.alphas_of_program()
    yield Section(title="MEMO, appendix, table 7: alpha", cells=alphas, unit="of 1")
    yield Section(
        title="MEMO, appendix, table 7: alpha without the rule, down to eighths", cells=of_program, unit="of 1"
    )
    for peer, name in paper_runs.NAMES.items():
        yield Section(title=f"MEMO, table 3: does any parallelism fit, {name}", cells=paper_runs.statuses(peer))
    yield from _ranks()
    lengths = paper_cells.fpdt_lengths()
    yield Section(title="FPDT, table 1: longest length in thousands of tokens (0: none)", cells=lengths)
    yield from _fpdt()


def _table3() -> Iterator[Section]:
    for peer, name in paper_runs.NAMES.items():
        for model in paper_cells.MODELS:
            runs = [run for run in paper_runs.runs(peer) if run.row["model"] == model]
            for column, what in _MEASURES.items():
                unit = "points" if column == "mfu_pct" else "%"
                cells = [run.cell(column) for run in runs]
                yield Section(title=f"MEMO, table 3, {name}, {model}: {what}", cells=cells, unit=unit)
                if column == "mfu_pct":
                    yield _listed(f"MEMO, table 3, {name}, {model}: MFU with the appendix's parallelism", runs)
    title = "MEMO, table 3, Megatron-LM below 64K: MFU without recomputation"
    yield Section(title=title, cells=paper_runs.without_recomputation(), unit="points")
    for peer, name in paper_runs.NAMES.items():
        title = f"MEMO, table 3, {name}: MFU with the parallelism that the search finds"
        yield Section(title=title, cells=paper_runs.found_cells(peer), unit="points")


def _listed(title: str, runs: Sequence[paper_runs.Run]) -> Section:
    cells = [run.cell("mfu_pct") for run in runs if run.listed]
    return Section(title=title, cells=cells, unit="points", part=True)


def _table4() -> Iterator[Section]:
    cells = [c.cell for c in paper_cells.table4()]
    yield Section(title="MEMO, table 4: MFU", cells=cells, unit="points")
    for method in paper_cells.ABLATIONS:
        of_method = [cell for cell in cells if cell.table == method]
        yield Section(title=f"MEMO, table 4, {method}: MFU", cells=of_method, unit="points", part=True)


def _ranks() -> Iterator[Section]:
    places = paper_runs.ranks()
    title = "MEMO, appendix, table 7: rank by time of the paper's parallelism (0: not found)"
    yield Section(title=title, cells=places)
    near = [
        replace(cell, paper="first three", ours="first three" if 1 <= cell.ours <= 3 else "later") for cell in places
    ]
    yield Section(
        title="MEMO, appendix, table 7: the paper's parallelism is among our first three", cells=near, part=True
    )


def _fpdt() -> Iterator[Section]:
    row, answer = paper_cells.fpdt_table3()
    others = [r for r in paper_cells.rows("fpdt_table3_llama8b_8gpu") if r["row"] != row["row"]]
    asked = {
        "MFU without recomputed operations": ("mfu_pct", answer.mfu, "points"),
        "MFU with recomputed operations": ("mfu_pct", answer.hfu, "points"),
        "device memory": ("hbm_gb", answer.device_bytes["total"] / 1e9, "GB"),
    }
    for what, (column, ours, unit) in asked.items():
        cell = Cell("Llama 8B", f"{row['max_seq_k']}K, 8 GPUs", float(row[column]), ours)
        column_of_others = [float(other[column]) for other in others]
        yield Section(title=f"FPDT, table 3: {what}", cells=[cell], unit=unit, others=column_of_others)


def best_alphas(sweep: Sequence[Cell]) -> list[Cell]:
    """Returns, for each length, the row with the highest MFU."""
    best = []
    for length in dict.fromkeys(cell.table for cell in sweep):
        found = [cell for cell in sweep if cell.table == length]
        paper, ours = (
            max(
                (c for c in found if isinstance(getattr(c, side), float)), key=lambda c, side=side: getattr(c, side)
            ).row
            for side in ("paper", "ours")
        )
        best.append(Cell(length, "best", paper, ours))
    return best
