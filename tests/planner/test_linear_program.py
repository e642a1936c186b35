import highspy
import pytest

from lightning_memo.planner import linear_program
from lightning_memo.planner.linear_program import SilentSolver


def minimum_of_one() -> linear_program.LinearProgram:
    """A column of at least 1 that is minimized."""
    program = linear_program.LinearProgram()
    program.minimize({program.column(1.0): 1.0})
    return program


def test_a_minimum_and_its_dual() -> None:
    program = linear_program.LinearProgram()
    column = program.column(0.0)
    row = program.row({column: 4.0}, least=2.0)
    program.minimize({column: 1.0})
    assert program.solve()
    assert program.values == pytest.approx([0.5])
    assert program.dual(row) == pytest.approx(0.25)


def test_solving_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints from C++."""
    assert minimum_of_one().solve()
    assert capfd.readouterr() == ("", "")


def test_a_program_without_a_solution() -> None:
    program = minimum_of_one()
    program.row({0: 1.0}, most=0.5)
    assert not program.solve()


def test_a_solver_that_fails_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)
    with pytest.raises(RuntimeError, match="HiGHS"):
        minimum_of_one().solve()
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kWarning)
    with pytest.raises(RuntimeError, match="HiGHS did not solve a linear program"):
        minimum_of_one().solve()


def test_an_unknown_option_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="rejected"):
        linear_program._accept(SilentSolver().setOptionValue("no_such_option", 1))
