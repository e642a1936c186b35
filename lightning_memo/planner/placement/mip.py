"""Placement as a mixed-integer program (MEMO, section 4.3), solved with HiGHS, and one-pass placements in many orders.

On traces of training steps, one of the orders nearly always meets the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import highspy
import numpy as np
import numpy.typing as npt

from lightning_memo.planner.linear_program import SilentSolver
from lightning_memo.planner.placement.placement_core import NativeCore, PythonCore, Ranks
from lightning_memo.planner.placement.problem import SectionedProblem
from lightning_memo.utils.array_types import Integers

MOST_PAIRS: Final = 4000
"""Maximum number of pairs of buffers alive together; larger problems gain nothing within a minute of HiGHS."""

_TALLEST: Final = 10**6
# HiGHS satisfies rows to about 1e-6. Problems with a higher peak are scaled down to this height, which makes their
# bounds inexact.


def pairs(problem: SectionedProblem) -> list[tuple[int, int]]:
    """Pairs of buffers that are alive together, each in ascending order."""
    return sorted({pair for s in range(problem.sections) for pair in combinations(problem.live(s).tolist(), 2)})


@dataclass(slots=True)
class _Model:
    """The program. Its columns are the offsets, the peak, and for each pair whether the second lies below the first."""

    problem: SectionedProblem
    best: int
    """Peak of the known placement, which serves as the big M of the program."""

    below: dict[tuple[int, int], int]
    """Index of the column of each pair."""

    scale: float = 1.0
    """Units of the problem per unit of the program."""

    starts: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return len(self.problem.size)

    @property
    def size(self) -> list[float]:
        return [size / self.scale for size in self.problem.size.tolist()]

    @property
    def height(self) -> float:
        return self.best / self.scale

    def add(self, entries: list[tuple[int, float]], lower: float, upper: float) -> None:
        self.index += [column for column, _ in entries]
        self.value += [value for _, value in entries]
        self.starts.append(len(self.index))
        self.lower.append(lower)
        self.upper.append(upper)


def improve(
    problem: SectionedProblem, offset: Integers, lower_bound: int, seconds: float
) -> tuple[Integers | None, int]:
    """Search for a placement with a lower peak, or for a proof that there is none.

    Args:
        problem: Buffers of which at most `MOST_PAIRS` pairs are alive together.
        offset: [buffers] Placement to start from, in units.
        lower_bound: Known lower bound of the peak, in units.
        seconds: Maximum time to search.

    Returns:
        Offsets of a lower placement, or None, and the proven lower bound in units.

    Raises:
        RuntimeError: HiGHS failed.
    """
    size = problem.size
    couples = pairs(problem)
    best = int((offset + size).max())
    columns = {pair: len(size) + 1 + k for k, pair in enumerate(couples)}
    model = _Model(problem, best, columns, scale=max(best / _TALLEST, 1.0))
    _add_pairs(model)
    _add_cliques(model)
    solver = _solver(model, lower_bound, seconds)
    _accept(solver.setSolution(_solution(model, offset)))
    _accept(solver.run())
    status = solver.getModelStatus()
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
        raise RuntimeError(f"HiGHS did not solve a placement: {solver.modelStatusToString(status)}")
    # Bounds are floating point, and peaks are whole units.
    bound = solver.getInfo().mip_dual_bound
    exact = np.isfinite(bound) and model.scale == 1.0
    proven = max(lower_bound, int(np.ceil(bound - 1e-6))) if exact else lower_bound
    values = solver.getSolution().col_value
    found = _stack(model, values) if len(values) else offset
    peak = int((found + size).max())
    better = peak < model.best and _disjoint(model, found)
    return (found if better else None), min(proven, peak if better else model.best)


def _add_pairs(model: _Model) -> None:
    """Of two buffers that are alive together, one ends below the other. All end below the peak."""
    size, big = model.size, model.height
    for buffer, own in enumerate(size):
        model.add([(buffer, 1.0), (model.peak, -1.0)], -highspy.kHighsInf, -own)
    for (i, j), column in model.below.items():
        model.add([(i, 1.0), (j, -1.0), (column, -big)], -highspy.kHighsInf, -size[i])
        model.add([(j, 1.0), (i, -1.0), (column, big)], -highspy.kHighsInf, big - size[j])


def _add_cliques(model: _Model) -> None:
    """All buffers of a section exclude each other: those below a buffer lift it by the sum of their sizes."""
    size = model.size
    for section in range(model.problem.sections):
        live = model.problem.live(section).tolist()
        for i in live:
            lift, press = [(i, 1.0)], [(i, 1.0), (model.peak, -1.0)]
            constant_lift, constant_press = 0.0, float(size[i])
            for j in live:
                if j == i:
                    continue
                # The column of (a, b) is 1 where b lies below a.
                column, sign = model.below[min(i, j), max(i, j)], 1.0 if i < j else -1.0
                lift.append((column, -sign * size[j]))
                press.append((column, -sign * size[j]))
                if i < j:
                    constant_press += size[j]
                else:
                    constant_lift += size[j]
            model.add(lift, constant_lift, highspy.kHighsInf)
            model.add(press, -highspy.kHighsInf, -constant_press)


def _solver(model: _Model, lower_bound: int, seconds: float) -> Any:
    size = np.array(model.size)
    columns = len(size) + 1 + len(model.below)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = columns, len(model.lower)
    program.col_cost_ = np.eye(1, columns, model.peak)[0]
    program.col_lower_ = np.concatenate([np.zeros(len(size)), [lower_bound / model.scale], np.zeros(len(model.below))])
    program.col_upper_ = np.concatenate([model.height - size, [model.height], np.ones(len(model.below))])
    program.row_lower_, program.row_upper_ = np.array(model.lower), np.array(model.upper)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.array(model.starts, np.int32)
    program.a_matrix_.index_ = np.array(model.index, np.int32)
    program.a_matrix_.value_ = np.array(model.value)
    kinds = highspy.HighsVarType
    program.integrality_ = [kinds.kContinuous] * (len(size) + 1) + [kinds.kInteger] * len(model.below)
    solver = SilentSolver()  # type: ignore[no-untyped-call]
    for option, value in (
        ("time_limit", max(seconds, 0.1)),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", 0.999 / model.scale),  # peaks are whole units of the problem
    ):
        _accept(solver.setOptionValue(option, value))
    _accept(solver.passModel(program))
    return solver


def _solution(model: _Model, offset: Integers) -> Any:
    solution = highspy.HighsSolution()
    order = [float(offset[j] < offset[i]) for i, j in model.below]
    solution.col_value = [*(offset / model.scale).tolist(), model.height, *order]
    solution.value_valid = True
    return solution


def _stack(model: _Model, values: Any) -> Integers:
    """Integer offsets from the order in the solution: each buffer lies on the highest buffer below it."""
    size = model.problem.size
    under: list[list[int]] = [[] for _ in size]
    for (i, j), column in model.below.items():
        if round(values[column]):
            under[i].append(j)
        else:
            under[j].append(i)
    offset = np.zeros(len(size), np.int64)
    for buffer in sorted(range(len(size)), key=lambda buffer: values[buffer]):
        offset[buffer] = max((offset[other] + size[other] for other in under[buffer]), default=0)
    return offset


def _disjoint(model: _Model, offset: Integers) -> bool:
    """False if HiGHS satisfied a row only within its tolerance, so that the order has a cycle."""
    first, second = np.array(list(model.below), np.int64).reshape(-1, 2).T
    end = offset + model.problem.size
    return bool(((end[first] <= offset[second]) | (end[second] <= offset[first])).all())


def _accept(status: Any) -> None:
    # HiGHS reports a rejected call, for example an unknown option, only by its status.
    if status == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS rejected a call while placing buffers")


# Sort keys by letter: Z size, W width in time (duration), A area, T largest load during the life (contention), S start.
ORDERS: Final = ("Z", "A", "W", "S", "WAT", "TAW", "TWA", "TZ")


def ranks(problem: SectionedProblem, order: str) -> Ranks:
    """[buffers] Rank of each buffer.

    Args:
        problem: The buffers.
        order: Letters of the sort keys. The largest buffer by the first key has rank 0; the next keys break ties.
    """
    keys: dict[str, npt.NDArray[Any]] = {
        "Z": -problem.size,
        "W": -problem.duration,
        "A": -problem.size.astype(np.float64) * problem.duration,
        "T": -problem.contention,
        "S": problem.ranges[:, 0],
    }
    letters = [*order, *(letter for letter in "ZW" if letter not in order)]
    return rank_of(np.lexsort(tuple(keys[letter] for letter in reversed(letters))))


def rank_of(order: Integers | Ranks) -> Ranks:
    """[buffers] Inverse of a permutation of the buffers."""
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


def placements(problem: SectionedProblem, core: NativeCore | PythonCore) -> Iterator[tuple[str, Integers]]:
    """Yield the name and the offsets of one placement after another.

    Args:
        problem: The buffers.
        core: Places them; offsets are in units of `problem`.
    """
    for order in ORDERS:
        rank = ranks(problem, order)
        buffers = rank_of(rank)
        yield f"{order} first fit", core.fit(buffers, tightest=False)
        yield f"{order} best fit", core.fit(buffers, tightest=True)
        yield f"{order} skyline", core.skyline(rank)
