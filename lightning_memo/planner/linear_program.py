"""A linear program that is built row by row and solved with HiGHS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import highspy

Terms = dict[int, float]
"""A linear expression: coefficient by column."""

_TIME_LIMIT_SECONDS: Final = 10.0
_TOLERANCE: Final = 1e-9


class LinearProgram:
    """A minimization problem. Rows are scaled to a largest coefficient of 1 because HiGHS's tolerances are absolute.

    Attributes:
        values: Value of each column in the last solution; unchanged by a solve that fails.
    """

    def __init__(self) -> None:
        self._solver = SilentSolver()  # type: ignore[no-untyped-call]
        for option, value in (
            ("time_limit", _TIME_LIMIT_SECONDS),
            ("primal_feasibility_tolerance", _TOLERANCE),
            ("dual_feasibility_tolerance", _TOLERANCE),
        ):
            _accept(self._solver.setOptionValue(option, value))
        self._costs: list[float] = []
        self._scales: list[float] = []
        self._duals: list[float] = []
        self.values: list[float] = []

    def column(self, lower: float, upper: float = highspy.kHighsInf) -> int:
        """Add a column (a variable) with its bounds, and return its index."""
        _accept(self._solver.addVar(lower, upper))
        self._costs.append(0.0)
        return len(self._costs) - 1

    def row(self, terms: Terms, *, least: float = -highspy.kHighsInf, most: float = highspy.kHighsInf) -> int:
        """Add the constraint `least <= terms <= most`, and return the index of the row."""
        scale = max(map(abs, terms.values()), default=0.0) or 1.0
        values = [value / scale for value in terms.values()]
        _accept(self._solver.addRow(least / scale, most / scale, len(terms), list(terms), values))
        self._scales.append(scale)
        return len(self._scales) - 1

    def minimize(self, terms: Terms) -> None:
        """Set the expression to minimize."""
        for column, old in enumerate(self._costs):
            self._costs[column] = new = terms.get(column, 0.0)
            if new != old:
                _accept(self._solver.changeColCost(column, new))

    def solve(self) -> bool:
        """Find an optimum, starting from the last one.

        Returns:
            False if the program is infeasible.

        Raises:
            RuntimeError: HiGHS failed or ran out of time.
        """
        _accept(self._solver.run())
        status = self._solver.getModelStatus()
        if status == highspy.HighsModelStatus.kUnknown:  # starting from the last optimum can fail
            _accept(self._solver.clearSolver())
            _accept(self._solver.run())
            status = self._solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return False
        if status != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"HiGHS did not solve a linear program: {self._solver.modelStatusToString(status)}")
        solution = self._solver.getSolution()
        self.values, self._duals = list(solution.col_value), list(solution.row_dual)
        return True

    def value(self, terms: Terms) -> float:
        """Value of an expression in the last solution."""
        return sum(value * self.values[column] for column, value in terms.items())

    def dual(self, row: int) -> float:
        """Change of the objective per unit by which the bound of a row is raised."""
        return self._duals[row] / self._scales[row]


def _accept(status: Any) -> None:
    # HiGHS reports a rejected call, for example an unknown option, only by its status.
    if status == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS rejected a call")


def add(many: Iterable[Terms]) -> Terms:
    """Add expressions."""
    total: Terms = {}
    for terms in many:
        for column, value in terms.items():
            total[column] = total.get(column, 0.0) + value
    return total


def scale(terms: Terms, factor: float) -> Terms:
    """Multiply an expression by a factor."""
    return {column: factor * value for column, value in terms.items()}


class SilentSolver(highspy.Highs):
    """HiGHS without output.

    highspy 1.16 prints two lines when its constructor enables callbacks, so output ends before that.
    """

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]
