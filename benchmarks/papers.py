"""Recomputes the papers' tables with the cost model: paper, ours and error, cell by cell.

    python benchmarks/papers.py
    python benchmarks/papers.py --write docs/papers.md

Beside each error stands that of the trivial guess: the mean of the paper's own column.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import fit_papers
import paper_cells
from paper_cells import Cell
from paper_sections import Section, sections

from lightning_memo.estimate.inputs.constants import constants_of
from lightning_memo.utils.files import replacing

_INTRODUCTION: Final = """# The papers' tables, recomputed

Written by `python benchmarks/papers.py --write docs/papers.md`. The tables are those of MEMO (7B and 13B), FPDT and
ZeRO, in `tests/reference/papers`. Nothing is looked up: each cell is an estimate, forced to the paper's parallelism and
alpha where the paper gives them, and to the fastest parallelism that is found where it does not.

"Error" is ours less the paper's, or its share of the paper's where the unit is %. "Error of the mean" is that of the
trivial guess: the mean of the paper's own column. Where ours is not below it, the paper's cells hardly differ, and the
model explains less of them than their mean does."""

_CHOSEN: Final = """What was chosen with tables at hand, so that their scores are of what was looked at, not of what was
predicted: FPDT's memory, counted in hidden states and buffers (`estimate/keeping.py`: 8 and 20 hidden states, 4 GB for
ZeRO), with its table 1; the three steps of the rule for alpha, with appendix table 7; and that DeepSpeed's attention
takes twice Megatron-LM's time (`estimate/methods.py`) and waits for ZeRO's gathers, with table 3: FlashAttention's
first version takes that time, and so does a kernel that computes masked pairs, too. DeepSpeed's loss of a divided
sequence keeps 14 bytes of a logit, as its code shows, where Megatron-LM's, in place, keeps 8. Table 3's Megatron-LM and
DeepSpeed, and FPDT, are in no fit."""

_DEVIATION: Final = 3.0
"""Points of MFU above which an error is listed by itself."""

_REASONS: Final = """Why, as far as it is known:

- Below 64K the paper lists no parallelism, nor whether it recomputed. Matrix products and attention have one share of
  the peak here at all lengths; small kernels are slower.
- Megatron-LM, 13B, 640K: reorganising takes twice what the model has; in all other cells it is within two fifths. Up
  to 384K the search finds TP 8 CP 2, which reorganises less than the two pipeline stages of the paper's runs.
- Megatron-LM, 7B, 512K and 640K: "oom" is also what the paper's appendix has; table 3 has a time.
- DeepSpeed's rows show no reorganisation, so that none is taken for it.
- FPDT does not tell what its MFU counts. With what is recomputed, ours is within a point."""


def markdown(found: Sequence[Section]) -> str:
    """The page for the documentation."""
    parts = [_INTRODUCTION, "## Summary", _summary(found), _deviations(found), _constants(), _errors()]
    for section in found:
        if not section.part:
            parts.append(f"## {section.title}" + (f"\n\n{section.note}" if section.note else ""))
            parts.append(_cells(section))
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Iterator[Sequence[str]], words: int) -> str:
    """Of markdown; the first columns are words, the others numbers."""
    marks = ["---"] * words + ["--:"] * (len(header) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, marks, *rows))


def _summary(found: Sequence[Section]) -> str:
    def row(section: Section) -> Sequence[str]:
        errors = ["", "", "", ""]
        if section.numbers:
            mean, trivial = (f"{value:.3g}" for value in (section.mean_error, section.mean_trivial_error))
            errors = [str(len(section.numbers)), mean, trivial, section.unit]
        same = f"{section.same} of {len(section.words)}" if section.words else ""
        return [section.title, *errors, same]

    note = "Mean absolute errors; where a cell is no number, whether both have the same (out of memory, say)."
    header = ["table", "numbers", "ours", "the mean", "unit", "the same"]
    return f"{note}\n\n{_table(header, map(row, found), 1)}"


def _deviations(found: Sequence[Section]) -> str:
    far = [
        (section, cell)
        for section in found
        for cell in section.numbers
        if section.unit == "points" and not section.part and abs(section.error(cell)) > _DEVIATION
    ]
    rows = ((section.title, *_row(section, cell)) for section, cell in far)
    header = ["table", "", "", "paper", "ours", "error", "error of the mean"]
    known = f"## Known deviations\n\nAll MFUs that are more than {_DEVIATION:g} points off:"
    return f"{known}\n\n{_table(header, rows, 3)}\n\n{_REASONS}"


def _cells(section: Section) -> str:
    header = ["", "", "paper", "ours", "error"] + (["error of the mean"] if section.numbers else [])
    return _table(header, (_row(section, cell)[: len(header)] for cell in section.cells), 2)


def _row(section: Section, cell: Cell) -> Sequence[str]:
    sign = " %" if section.unit == "%" else ""
    errors = ["" if cell.paper == cell.ours else "differs", ""]
    if cell in section.numbers:
        errors = [f"{value:+.3g}{sign}" for value in (section.error(cell), section.trivial_error(cell))]
    return [str(cell.table), cell.row, _text(cell.paper), _text(cell.ours), *errors]


def _text(value: float | int | str) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _constants() -> str:
    constants = constants_of("a800")
    rows = ([name, f"{getattr(constants, name):.4g}", _unit(name)] for name in fit_papers.FITTED)
    read = ("device_share", "host_share", "fragmentation", "cache_growth")
    stated = ", ".join(f"{name} {getattr(constants, name):g}" for name in read)
    fitted = "## Constants\n\nSix are fitted to tables 3 (Memo), 4 and 5, by `benchmarks/fit_papers.py`:"
    thresholds = f"Four are thresholds, read off which cells are out of memory, and which reorganise it: {stated}."
    return f"{fitted}\n\n{_table(['', 'value', 'unit'], rows, 1)}\n\n{thresholds}\n\n{_CHOSEN}"


def _unit(constant: str) -> str:
    if constant.endswith("_bytes_per_second"):
        return "bytes per second"
    return "share of the bandwidth of copies" if constant.startswith("host") else "share of the peak FLOP/s"


def _errors() -> str:
    lines = [f"- {table}, {model}, {seq_k}K: {what}." for (table, model, seq_k), what in paper_cells.ERRORS.items()]
    how = "None of these is fitted. Where two numbers of a cell contradict the third, that one is put right below."
    return f"## Errors of the papers\n\n{how}\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page, too")
    options = parser.parse_args()
    page = markdown(list(sections()))
    print(page)
    if options.write is not None:
        with replacing(options.write) as unfinished:
            unfinished.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
