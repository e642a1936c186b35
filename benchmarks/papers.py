"""Recomputes the papers' tables with the cost model, and compares each cell with the paper.

    python benchmarks/papers.py             # writes docs/papers.md and benchmarks/results/papers.csv
    python benchmarks/papers.py --check     # status 1 if the page or the table is out of date

Next to each error is the error of a trivial guess, the mean of the paper's own column.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import fit_papers
import paper_cells
from paper_programs import PUBLISHED_ALPHAS
from paper_sections import Section, sections

from lightning_memo.utils.files import replacing

_ROOT: Final = Path(__file__).parents[1]
PAGE: Final = _ROOT / "docs" / "papers.md"
TABLE: Final = _ROOT / "benchmarks" / "results" / "papers.csv"

_FAR: Final = 3.0
"""Errors above this many points of MFU count as deviations."""

_SHOWN: Final = {
    "ZeRO, table 1: the model's state on a GPU": "ZeRO, table 1: memory of the model's state",
    "MEMO, table 3, Memo, 7B: MFU with the appendix's parallelism": "MEMO, table 3, Memo 7B: MFU",
    "MEMO, table 3, Memo, 13B: MFU with the appendix's parallelism": "MEMO, table 3, Memo 13B: MFU",
    "MEMO, table 3, Megatron-LM, 7B: MFU with the appendix's parallelism": "MEMO, table 3, Megatron-LM 7B: MFU",
    "MEMO, table 3, Megatron-LM, 13B: MFU with the appendix's parallelism": "MEMO, table 3, Megatron-LM 13B: MFU",
    "MEMO, table 3, DeepSpeed, 7B: MFU with the appendix's parallelism": "MEMO, table 3, DeepSpeed 7B: MFU",
    "MEMO, table 3, DeepSpeed, 13B: MFU with the appendix's parallelism": "MEMO, table 3, DeepSpeed 13B: MFU",
    "MEMO, table 4: MFU": "MEMO, table 4 (ablation): MFU",
    "MEMO, table 5: MFU by alpha": "MEMO, table 5: MFU by alpha",
    "MEMO, appendix, table 7: alpha": "MEMO, table 7: alpha",
    "MEMO, appendix, table 7: the paper's parallelism is among our first three":
        "MEMO, table 7: the paper's parallelism is among the three fastest of the search",
    "MEMO, table 3: does any parallelism fit, Memo": "MEMO, table 3: does any parallelism fit, Memo",
    "MEMO, table 3: does any parallelism fit, Megatron-LM": "MEMO, table 3: does any parallelism fit, Megatron-LM",
    "MEMO, table 3: does any parallelism fit, DeepSpeed": "MEMO, table 3: does any parallelism fit, DeepSpeed",
    "FPDT, table 1: longest length in thousands of tokens (0: none)": "FPDT, table 1: longest length",
    "FPDT, table 3: MFU with recomputed operations": "FPDT, table 3: MFU, if it counts recomputed operations",
    "FPDT, table 3: device memory": "FPDT, table 3: device memory",
}  # fmt: skip
"""Sections that the page shows, with their names there; the table has the cells of all."""


def markdown(found: Sequence[Section]) -> str:
    """Returns the page for the documentation."""
    return "\n\n".join([_introduction(), _summary(found), _deviations(found), _constants()]) + "\n"


def table(found: Sequence[Section]) -> str:
    """Returns a CSV table of all cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "model", "cell", "paper", "ours", "unit", "error", "error of the mean"])
    for section in found:
        for cell in section.cells if not section.part else ():
            errors = ["" if cell.paper == cell.ours else "differs", ""]
            if cell in section.numbers:
                errors = [f"{value:+.3g}" for value in (section.error(cell), section.trivial_error(cell))]
            writer.writerow(
                [section.title, cell.table, cell.row, _text(cell.paper), _text(cell.ours), section.unit, *errors]
            )
    return text.getvalue()


def _introduction() -> str:
    return """# The papers' tables, recomputed

[Estimates](estimate.md) predict the memory and time of this project's training. `benchmarks/paper_programs.py` predicts
those of the papers' programs, with the same hardware, collectives and planner. This page says how well it reproduces
published tables: those of MEMO (7B and 13B), FPDT and ZeRO. No value is looked up; each cell is an estimate. Where a
paper names the parallelism and alpha of a cell, the estimate uses them. `python benchmarks/papers.py` generates this
page and `benchmarks/results/papers.csv`, which has all cells."""


def _summary(found: Sequence[Section]) -> str:
    by_title = {section.title: section for section in found}
    rows = ["| table | cells | our error | error of the mean | equal answers |", "| --- | --: | --: | --: | --: |"]
    for title, name in _SHOWN.items():
        section = by_title[title]
        error = mean = same = ""
        if section.numbers:
            unit = f" {section.unit}" if section.unit in ("points", "GB") else ""
            error, mean = (f"{value:.2g}{unit}" for value in (section.mean_error, section.mean_trivial_error))
        if section.words:
            same = f"{section.same} of {len(section.words)}"
        rows.append(f"| {name} | {len(section.cells)} | {error} | {mean} | {same} |")
    return f"""## How well

Errors are mean absolute errors; MFU is in points. "Error of the mean" is the error of a trivial guess, the mean of the
paper's own column. If our error is not smaller, the paper's cells hardly differ. "Equal answers" counts cells
without a number, such as out of memory. Rows of table 3 are the lengths from 64K on, whose parallelism the paper lists.

{chr(10).join(rows)}"""


def _deviations(found: Sequence[Section]) -> str:
    by_title = {section.title: section for section in found}
    listed, others = [], []
    for section in found:
        if section.title.startswith("MEMO, table 3") and section.title.endswith("B: MFU"):
            for cell in section.numbers:
                (others if cell.row.endswith("found") else listed).append(abs(section.error(cell)))
    far, far_others = (sum(error > _FAR for error in errors) for errors in (listed, others))
    kept = by_title["MEMO, table 3, Megatron-LM below 64K: MFU without recomputation"]
    searched = [
        abs(section.error(cell))
        for section in found
        if section.title.endswith("MFU with the parallelism that the search finds")
        for cell in section.numbers
    ]
    without_rule = by_title["MEMO, appendix, table 7: alpha without the rule, down to eighths"].mean_error
    fpdt = by_title["FPDT, table 3: MFU without recomputed operations"].mean_error
    limits = ", ".join(f"{least:g}" for least, _ in PUBLISHED_ALPHAS)
    return f"""## Where the estimate deviates

- **Lengths below 64K.** {far_others} of {len(others)} MFUs of table 3 whose parallelism is not listed are off by more
  than {_FAR:g} points, but only {far} of {len(listed)} of the listed ones. Below 64K, the paper states neither the
  parallelism nor whether it recomputed. The model also runs products and attention at one share of the peak at all
  lengths, while real small kernels are slower: without recomputation, Megatron-LM's MFU there is off by
  {kept.mean_error:.2g} points. The paper's numbers for Memo equal those of Megatron-LM below 64K.
- **Megatron-LM, 13B, 640K.** Reorganising memory takes twice as long as in the model. Up to 384K the search finds TP 8
  CP 2, which reorganises less than the two pipeline stages of the paper's runs.
- **Parallelism that the search finds.** With it instead of the paper's, MFUs of table 3 are off by
  {fmean(searched):.2g} points on average. The search covers no pipelines.
- **DeepSpeed** shows no reorganisation of memory, so the model has none for it.
- **Alpha.** The runs of the paper did not use the linear program's alpha, and no physical rule was found for theirs.
  The model follows a rule that describes them: alpha is 1, 1/2 or 1/8 if the program's alpha is at least
  {limits}, and otherwise 0. It is also 0 if the copies of all tokens take longer than the forward pass. Without the
  rule, the mean error of alpha is {without_rule:.2g}.
- **FPDT** does not say whether its MFU counts recomputed operations. If it does not, ours is off by {fpdt:.2g} points.
  The other nine rows of its table 3 are intermediate steps that are not estimated."""


def _constants() -> str:
    names = ", ".join(f"`{name}`" for name in fit_papers.FITTED)
    return f"""## What was fitted, and what was known

`benchmarks/fit_papers.py` fits six constants to MEMO's tables 3 (Memo), 4 and 5: {names}. Four thresholds
(`device_share`, `host_share`, `fragmentation`, `cache_growth`) follow from which cells run out of memory, and which
reorganise it. The values are `A800` and `MEGATRON_MEMORY` in `benchmarks/paper_programs.py`. The rows of Megatron-LM
and DeepSpeed, and FPDT, are not part of any fit.

Some choices were made with the tables at hand, so their scores are not predictions: FPDT's memory in hidden states and
buffers, the rule for alpha, and, with table 3, DeepSpeed's attention, which takes twice Megatron-LM's time, its waits
for ZeRO's gathers, and its loss, which keeps 14 bytes per logit (Megatron-LM: 8). FlashAttention's first version takes
twice the time, and so does a kernel that computes masked pairs.

{len(paper_cells.ERRORS)} cells of the papers contradict themselves or another table; `ERRORS` in
`benchmarks/paper_cells.py` lists them. None of them is fitted."""


def _text(value: float | int | str) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if page or table is out of date")
    options = parser.parse_args()
    found = list(sections())
    made = {PAGE: markdown(found), TABLE: table(found)}
    if options.check:
        old = [str(path) for path, text in made.items() if not path.is_file() or path.read_text("utf-8") != text]
        if old:
            print(f"out of date: {', '.join(old)}: run benchmarks/papers.py", file=sys.stderr)
        return 1 if old else 0
    for path, text in made.items():
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
