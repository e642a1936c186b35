"""A linear program in HiGHS, built row by row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import highspy

Terms = dict[int, float]
"""Coefficients by column."""

_TIME_LIMIT_SECONDS: Final = 10.0
_TOLERANCE: Final = 1e-9


class LinearProgram:
    """A program that is minimised. Rows are scaled to largest coefficient 1, as HiGHS's tolerances are absolute.

    Attributes:
        values: Of the columns, at the last solution; a solve that fails leaves them as they were.
    """

    def __init__(self) -> None:
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (
            ("output_flag", False),
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
        """Add a column; returns its number."""
        _accept(self._solver.addVar(lower, upper))
        self._costs.append(0.0)
        return len(self._costs) - 1

    def row(self, terms: Terms, *, least: float = -highspy.kHighsInf, most: float = highspy.kHighsInf) -> int:
        """Add `least <= terms <= most`; returns the row's number."""
        scale = max(map(abs, terms.values()), default=0.0) or 1.0
        values = [value / scale for value in terms.values()]
        _accept(self._solver.addRow(least / scale, most / scale, len(terms), list(terms), values))
        self._scales.append(scale)
        return len(self._scales) - 1

    def minimise(self, terms: Terms) -> None:
        """Set the objective."""
        for column, old in enumerate(self._costs):
            self._costs[column] = new = terms.get(column, 0.0)
            if new != old:
                _accept(self._solver.changeColCost(column, new))

    def solve(self) -> bool:
        """Find an optimum, beginning at the last one.

        Returns:
            False if there is no solution.

        Raises:
            RuntimeError: HiGHS failed, or ran out of time.
        """
        _accept(self._solver.run())
        status = self._solver.getModelStatus()
        if status == highspy.HighsModelStatus.kUnknown:  # the last optimum can be a beginning that leads nowhere
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
        """Of an expression, at the last solution."""
        return sum(value * self.values[column] for column, value in terms.items())

    def dual(self, row: int) -> float:
        """What the objective changes by for each unit that a row's bound is raised."""
        return self._duals[row] / self._scales[row]


def _accept(status: Any) -> None:
    # HiGHS reports a refused call, an unknown option included, only by its status.
    if status == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS refused a call")


def add(many: Iterable[Terms]) -> Terms:
    """Sum of expressions."""
    total: Terms = {}
    for terms in many:
        for column, value in terms.items():
            total[column] = total.get(column, 0.0) + value
    return total


def scale(terms: Terms, factor: float) -> Terms:
    """`factor` times an expression."""
    return {column: factor * value for column, value in terms.items()}
