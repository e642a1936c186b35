"""Fits the six time constants to MEMO's tables 3, 4 and 5 (7B and 13B), and prints them.

    python benchmarks/fit_papers.py

The fit minimizes absolute errors of MFU in percentage points, by Gauss-Newton steps in the logarithms of the constants
in which the weight of each cell is the inverse of its error. The results are copied by hand, with three digits, to
benchmarks/paper_programs.py, and those that other clusters share to lightning_memo/estimate/calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import paper_cells

FITTED = {
    "dense_efficiency": 0.7,
    "attention_forward_efficiency": 0.7,
    "attention_backward_efficiency": 0.6,
    "host_efficiency": 0.95,
    "merged_bytes_per_second": 5e10,
    "reorganised_bytes_per_second": 5e9,
}
"""The constants, with the start values of the search."""

_OF_ALLOCATOR = "reorganised_bytes_per_second"
_ITERATIONS = 40
_STEP = 1e-3
_LEAST_ERROR = 0.05  # points; smaller errors get no more weight
_LONGEST_STEP = 0.3
_LAST_STEP = 2e-4  # smaller than the third digit, the last that is kept

Floats = npt.NDArray[np.float64]


def main() -> None:
    cells = paper_cells.mfu_cells()
    values = least_absolute(lambda values: residuals(cells, values), np.array(list(FITTED.values())))
    for name, value in zip(FITTED, values, strict=True):
        print(f"{name:32} {value:.4g}")
    print(f"mean absolute error of {len(cells)} cells: {np.abs(residuals(cells, values)).mean():.3f} points")


def residuals(cells: Sequence[paper_cells.MfuCell], values: Floats) -> Floats:
    """[cells] Returns our MFU minus the paper's, in points.

    Args:
        cells: The cells of the tables.
        values: [6] The fitted constants.
    """
    fitted = dict(zip(FITTED, map(float, values), strict=True))
    return np.array([_mfu(cell, fitted) - cell.paper for cell in cells])


def _mfu(cell: paper_cells.MfuCell, fitted: dict[str, float]) -> float:
    run, shares = cell.run, {name: value for name, value in fitted.items() if name != _OF_ALLOCATOR}
    allocator = replace(run.allocator, **{_OF_ALLOCATOR: fitted[_OF_ALLOCATOR]})
    run = replace(run, constants=replace(run.constants, **shares), allocator=allocator)
    mfu = run.estimate(cell.parallel).mfu
    assert mfu is not None, cell
    return mfu


def least_absolute(residuals_of: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Returns the positive values near `start` with the smallest sum of absolute residuals.

    Args:
        residuals_of: Computes the residuals for given values.
        start: Start of the search. A value that is at most 1 here is at most 1 in the result.
    """
    most = np.where(start <= 1, 1.0, np.inf)
    values, errors, damping = start, residuals_of(start), 1e-3
    for _ in range(_ITERATIONS):
        moved = [residuals_of(values * (1 - _STEP * unit)) for unit in np.eye(len(values))]
        slopes = (errors - np.stack(moved)).T / _STEP
        weights = 1 / np.maximum(np.abs(errors), _LEAST_ERROR)
        normal, gradient = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * errors)
        step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        trial = np.minimum(values * np.exp(np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)), most)
        if np.abs(trial / values - 1).max() < _LAST_STEP:
            break
        found = residuals_of(trial)
        if np.abs(found).sum() < np.abs(errors).sum():
            values, errors, damping = trial, found, damping / 5
        else:
            damping *= 5
    return values


if __name__ == "__main__":
    main()
