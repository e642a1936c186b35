"""Recomputes the papers' tables with the cost model: paper, ours and error, cell by cell.

    python benchmarks/papers.py
    python benchmarks/papers.py --write docs/papers.md

Beside the mean error of a table stands that of the trivial guess: the mean of the paper's own cells.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import fit_papers
import paper_cells
from paper_cells import Cell

from lightning_memo.estimate.alpha_rule import PUBLISHED_ALPHAS
from lightning_memo.estimate.constants import constants_of
from lightning_memo.files import replacing

_INTRODUCTION = """# The papers' tables, recomputed

Written by `python benchmarks/papers.py --write docs/papers.md`. The tables are those of MEMO (7B and 13B), FPDT and
ZeRO, in `tests/data/papers`. Nothing is looked up: each cell is an estimate, forced to the paper's parallelism and
alpha where the paper gives them. Where an error is not below the trivial guess's, the paper's cells hardly differ,
and the model explains less of them than their mean does."""

_CHOSEN = """FPDT's memory is counted in hidden states and buffers (`estimate/keeping.py`: 8 and 20 hidden states, 4 GB
for ZeRO), chosen with its table 1 at hand, and so are the three steps of the rule for alpha with appendix table 7:
these scores are of what was looked at, not of what was predicted. Of DeepSpeed, Megatron and FPDT only the status is
compared: their MFU (table 3 of MEMO, table 3 of FPDT) is not fitted, and can be far off."""

_RULE = """The linear program of training has one alpha for a cell. The runs of MEMO's paper had others, for which no
physical rule was found. What describes them: alpha is 1, 1/2 or 1/8 where the linear program's is at least {limits},
else 0; and 0 unless the copies of all tokens would hide under the forward. Only `cluster=a800`, whose constants are
those of the paper's program, follows that, and says so in `limits`."""


@dataclass(frozen=True)
class Section:
    """A table, and how its errors are summed up."""

    title: str
    cells: Sequence[Cell]
    note: str = ""

    @property
    def numbers(self) -> list[tuple[float, float]]:
        """Paper and ours where both have a number."""
        return [(c.paper, c.ours) for c in self.cells if isinstance(c.paper, float) and isinstance(c.ours, float)]

    @property
    def mean_error(self) -> float:
        return sum(abs(ours - paper) for paper, ours in self.numbers) / len(self.numbers)

    @property
    def trivial_error(self) -> float:
        """Of the mean of the paper's own cells."""
        mean = sum(paper for paper, _ in self.numbers) / len(self.numbers)
        return sum(abs(paper - mean) for paper, _ in self.numbers) / len(self.numbers)

    @property
    def summary(self) -> str:
        parts = []
        if self.numbers:
            parts.append(
                f"Mean absolute error of {len(self.numbers)} cells: {self.mean_error:.3f}; of their own mean: "
                f"{self.trivial_error:.3f}."
            )
        others = [cell for cell in self.cells if not (isinstance(cell.paper, float) and isinstance(cell.ours, float))]
        if others:
            parts.append(f"The same: {sum(cell.paper == cell.ours for cell in others)} of {len(others)}.")
        return " ".join(parts)


def sections() -> Iterator[Section]:
    """All tables."""
    mfu3, mfu4, mfu5 = (
        [c.cell for c in cells()] for cells in (paper_cells.table3, paper_cells.table4, paper_cells.table5)
    )
    yield Section("ZeRO, table 1: GB of the model's state on a GPU", paper_cells.zero_table())
    for model in paper_cells.GPUS:
        cells = [cell for cell in mfu3 if cell.table == model]
        yield Section(f"MEMO, table 3, {model}: MFU in percent", cells)
    note = (
        "Full Recomputation without a plan is Megatron-LM. What its allocator's reorganisations take has one "
        "rate: skeletal activations over it, and over the share of memory that is free."
    )
    yield Section("MEMO, table 4: MFU in percent", mfu4, note)
    for method in paper_cells.ABLATIONS:
        yield Section(f"MEMO, table 4, {method}", [cell for cell in mfu4 if cell.table == method])
    yield Section("MEMO, table 5: MFU in percent by alpha", mfu5)
    yield Section("MEMO, table 5: best alpha of each length", best_alphas(mfu5))
    limits = ", ".join(f"{least:g}" for least, _ in PUBLISHED_ALPHAS)
    yield Section("MEMO, appendix, table 7: alpha", paper_cells.alphas(), _RULE.format(limits=limits))
    yield Section("The same without the rule: the linear program, down to eighths", paper_cells.alphas_of_program())
    for peer, method in paper_cells.PEERS.items():
        yield Section(f"MEMO, table 3: does any parallelism fit, {method}", paper_cells.statuses(peer))
    places = paper_cells.ranks()
    first = sum(1 <= cell.ours <= 3 for cell in places)
    note = f"Among the first three: {first} of {len(places)}. Pipelines are not searched, and so not found."
    yield Section("MEMO, appendix, table 7: place by time of the paper's parallelism (0: not found)", places, note)
    yield Section("FPDT, table 1: longest length in thousands of tokens (0: none)", paper_cells.fpdt_lengths())


def best_alphas(sweep: Sequence[Cell]) -> list[Cell]:
    """The row with the highest MFU of each length."""
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


def markdown(found: Sequence[Section]) -> str:
    """The page for the documentation."""
    parts = [_INTRODUCTION, _constants(), _errors()]
    for section in found:
        parts.append(f"## {section.title}\n\n{section.summary}" + (f"\n\n{section.note}" if section.note else ""))
        lines = ["| | | paper | ours | error |", "| --- | --- | --: | --: | --: |"]
        lines += [f"| {c.table} | {c.row} | {_text(c.paper)} | {_text(c.ours)} | {_error(c)} |" for c in section.cells]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _constants() -> str:
    constants = constants_of("a800")
    lines = [f"| {name} | {getattr(constants, name):.4g} | {_unit(name)} |" for name in fit_papers.FITTED]
    read = ("device_share", "host_share", "fragmentation", "cache_growth")
    stated = ", ".join(f"{name} {getattr(constants, name):g}" for name in read)
    return (
        "## Constants\n\nSix are fitted to tables 3, 4 and 5, by `benchmarks/fit_papers.py`:\n\n"
        "| | | unit |\n| --- | --: | --- |\n"
        + "\n".join(lines)
        + f"\n\nFour are thresholds, read off which cells are out of memory: {stated}.\n\n{_CHOSEN}"
    )


def _unit(constant: str) -> str:
    if constant.endswith("_bytes_per_second"):
        return "bytes per second"
    return "share of the bandwidth of copies" if constant.startswith("host") else "share of the peak FLOP/s"


def _errors() -> str:
    lines = [f"- {table}, {model}, {seq_k}K: {what}." for (table, model, seq_k), what in paper_cells.ERRORS.items()]
    return "## Errors of the papers\n\nNone of these is fitted.\n\n" + "\n".join(lines)


def _text(value: float | int | str) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _error(cell: Cell) -> str:
    if isinstance(cell.paper, float) and isinstance(cell.ours, float):
        return f"{cell.ours - cell.paper:+.3g}"
    return "" if cell.paper == cell.ours else "differs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page, too")
    options = parser.parse_args()
    found = list(sections())
    page = markdown(found)
    print(page)
    for section in found:
        print(f"{section.title}: {section.summary}")
    if options.write is not None:
        with replacing(options.write) as unfinished:
            unfinished.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
