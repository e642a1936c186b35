"""The cost model against the papers' tables: what it has to reach."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fit_papers  # noqa: E402
import numpy as np  # noqa: E402
import paper_cells  # noqa: E402
import papers  # noqa: E402
from paper_cells import Cell  # noqa: E402


def mean_error(cells: Sequence[Cell], count: int) -> float:
    """Of MFU, over all the cells that the paper has one for; each needs one of ours."""
    numbers = [cell for cell in cells if isinstance(cell.paper, float)]
    assert len(numbers) == count
    assert all(isinstance(cell.ours, float) for cell in numbers), numbers
    return sum(abs(cell.ours - cell.paper) for cell in numbers) / count


def same(cells: Sequence[Cell]) -> int:
    return sum(cell.paper == cell.ours for cell in cells)


def test_zero_memory() -> None:
    cells = paper_cells.zero_table()
    assert len(cells) == 54
    for cell in cells:
        printed = 2 if cell.paper < 2 else 1 if cell.paper % 1 else 0  # decimals of the paper's number
        assert cell.paper == pytest.approx(cell.ours, rel=0.01) or round(cell.ours, printed) == cell.paper, cell


@pytest.mark.parametrize(("model", "count"), [("7B", 9), ("13B", 12)])
def test_mfu_of_table_3(model: str, count: int) -> None:
    assert mean_error([c.cell for c in paper_cells.table3() if c.table == model], count) <= 0.6


def test_mfu_of_table_4_without_a_plan_included() -> None:
    assert mean_error([c.cell for c in paper_cells.table4()], 21) <= 0.6


def test_mfu_of_table_5() -> None:
    assert mean_error([c.cell for c in paper_cells.table5()], 30) <= 0.2


def test_best_alpha_of_each_row_of_table_5() -> None:
    best = papers.best_alphas([c.cell for c in paper_cells.table5()])
    assert len(best) == same(best) == 4


def test_host_feasibility_of_tables_4_and_5() -> None:
    """What swaps all tokens, or a given fraction of them."""
    cells = [c.cell for c in paper_cells.table4() if c.table == "Full Swapping + Memory Plan"]
    cells = [*cells, *(c.cell for c in paper_cells.table5())]
    assert len(cells) == 44
    assert [cell for cell in cells if (cell.paper == "oohm") != (cell.ours == "oohm")] == []


def test_memory_of_table_4() -> None:
    for cell in (c.cell for c in paper_cells.table4()):
        assert isinstance(cell.ours, float) == isinstance(cell.paper, float), cell


def test_alpha_of_the_appendix() -> None:
    cells = paper_cells.alphas()
    assert mean_error(cells, 21) <= 0.06
    assert mean_error(paper_cells.alphas_of_program(), 21) > mean_error(cells, 21)


@pytest.mark.parametrize(("peer", "least"), [("Memo", 24), ("Mega", 22)])
def test_what_fits_of_table_3(peer: str, least: int) -> None:
    cells = paper_cells.statuses(peer)
    assert len(cells) == 24
    assert same(cells) >= least


def test_longest_lengths_of_fpdt() -> None:
    cells = paper_cells.fpdt_lengths()
    assert len(cells) == 24
    assert same(cells) >= 21


def test_parallelism_of_the_paper_is_among_the_fastest() -> None:
    places = [cell.ours for cell in paper_cells.ranks()]
    assert len(places) == 21
    assert sum(1 <= place <= 3 for place in places) >= 18


def test_errors_of_the_papers_are_named() -> None:
    """The MFU that a rate of tokens implies contradicts what is printed, where that is said, and nowhere else."""
    wrong = set()
    for row in paper_cells.rows("memo_table3_sigmod"):
        if row["status"] == "ok":
            shape, tokens = paper_cells.shape_of(row["model"]), int(row["seq_k"]) * 1024
            implied = 100 * float(row["tgs"]) * shape.model_flops(tokens) / tokens / 312e12
            if abs(implied - float(row["mfu_pct"])) > 0.5:
                wrong.add((row["model"], int(row["seq_k"]), row["method"]))
    assert wrong == {("7B", 896, "Memo"), ("13B", 640, "Mega"), ("7B", 64, "DS")}
    assert {key[:2] for key in wrong} <= {key[1:] for key in paper_cells.ERRORS}


def test_constants_are_what_the_fit_finds() -> None:
    constants = paper_cells.question("7B", 64).constants
    kept = np.array([getattr(constants, name) for name in fit_papers.FITTED])
    cells = paper_cells.mfu_cells()

    def error(values: fit_papers.Floats) -> float:
        return float(np.abs(fit_papers.residuals(cells, values)).mean())

    best = error(kept)
    for index in range(len(kept)):
        for factor in (0.97, 1.03):
            moved = kept * np.where(np.arange(len(kept)) == index, factor, 1.0)
            if moved[index] <= 1 or kept[index] > 1:
                assert error(moved) > best - 0.01, list(fit_papers.FITTED)[index]


def test_fit_finds_what_made_the_numbers() -> None:
    truth, inputs = np.array([0.5, 3.0]), np.linspace(1, 4, 9)
    measured = inputs / truth[0] + truth[1] * inputs**2
    measured[4] += 5  # an outlier does not move the least absolute errors
    found = fit_papers.least_absolute(
        lambda values: inputs / values[0] + values[1] * inputs**2 - measured, np.array([0.9, 2.0])
    )
    np.testing.assert_allclose(found, truth, rtol=0.02)


def test_page_in_the_documentation_is_current() -> None:
    assert (ROOT / "docs" / "papers.md").read_text(encoding="utf-8") == papers.markdown(list(papers.sections()))
