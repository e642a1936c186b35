"""Comparisons between the results of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from cells.cell import Cell, Result
from cells.flops import shape_of
from cells.methods import METHODS
from cells.plans import ALPHAS, BOUND_LAYERS, BOUND_METHODS

DEFAULTS = ("memo_auto", "memo_auto_unplanned")
"""The default settings, with planned memory and without."""

RECOMPUTED = "checkpointing"
LOSS_TOLERANCE = 2**-8
"""Relative tolerance of first losses in bf16, which has eight significant bits."""

NORM_TOLERANCE = 2**-6
"""Relative tolerance of the norms of first gradients, which depend more on the order of sums."""

_SAME: tuple[tuple[str, Callable[[Result], float], float], ...] = (
    ("first loss", lambda result: float(result["losses"][0]), LOSS_TOLERANCE),
    ("first gradient's norm", lambda result: float(result["gradient_norm"]), NORM_TOLERANCE),
)


@dataclass(frozen=True)
class Group:
    """Results of one model, trained one way, on one device, with one state of the code.

    Args:
        cell: One cell of the group; its method and length are not used.
        code: The commit and the day of the results, see `code_of`.
        results: All results of the group.
        everything: The results of all groups of the device.
    """

    cell: Cell
    code: str
    results: Sequence[Result]
    everything: Sequence[Result]

    @cached_property
    def _by_place(self) -> dict[tuple[str, int], Result]:
        return {(r["cell"]["method"], r["cell"]["tokens"]): r for r in self.results}

    @property
    def lengths(self) -> list[int]:
        """Lengths with at least one result."""
        return sorted({tokens for _, tokens in self._by_place})

    @property
    def methods(self) -> list[str]:
        """Methods with at least one result, in the usual order."""
        tried = {method for method, _ in self._by_place}
        return [method for method in METHODS if method in tried]

    def result(self, method: str, tokens: int) -> Result | None:
        """Returns the result of a cell, or `None` if it was not tried."""
        return self._by_place.get((method, tokens))

    def finished(self, method: str, tokens: int) -> Result | None:
        """Returns a result that has a time, or `None`."""
        result = self.result(method, tokens)
        return result if result is not None and result["status"] == "ok" and result["median_seconds"] else None

    def seconds(self, method: str, tokens: int) -> float | None:
        """Returns the time of a step, or `None` if there is none, or if the method had not settled before."""
        result = self.finished(method, tokens)
        return None if result is None or not is_settled(result) else float(result["median_seconds"])

    def default(self, tokens: int) -> tuple[str, float] | None:
        """Returns the faster of the default settings, with planned memory and without, and its time in seconds."""
        return self._fastest([method for method in DEFAULTS if method in self.methods], tokens)

    def best_other(self, tokens: int, fused: bool = True) -> tuple[str, float] | None:
        """Returns the fastest method of another project, and its time in seconds.

        Args:
            tokens: Number of tokens.
            fused: Whether methods with fused kernels are among them.
        """
        others = [m for m in self.methods if not METHODS[m].is_memo and (fused or not METHODS[m].fused)]
        return self._fastest(others, tokens)

    def best_memo(self, tokens: int) -> tuple[str, float] | None:
        """Returns the fastest setting of this project's strategy, and its time in seconds."""
        return self._fastest([method for method in self.methods if METHODS[method].is_memo], tokens)

    def best_alpha(self, tokens: int) -> tuple[str, float] | None:
        """Returns the fastest alpha that was tried, and its time in seconds."""
        return self._fastest([m for m in ALPHAS if m in self.methods and m.startswith("memo_alpha")], tokens)

    def _fastest(self, methods: Iterable[str], tokens: int) -> tuple[str, float] | None:
        timed = [(seconds, m) for m in methods if (seconds := self.seconds(m, tokens)) is not None]
        return min(timed)[::-1] if timed else None

    def bound_seconds(self, tokens: int, method: str = "plain") -> float | None:
        """Returns the time of a step without recomputation and waiting, extrapolated from few layers.

        Args:
            tokens: Number of tokens.
            method: Plain training, with the usual kernels or with others.
        """
        first, second = BOUND_LAYERS
        few = [self._few_seconds(method, layers, tokens) for layers in BOUND_LAYERS]
        if few[0] is None or few[1] is None:
            return None
        layer = (few[1] - few[0]) / (second - first)
        return few[0] + (shape_of(self.cell).layers - first) * layer

    def _few_seconds(self, method: str, layers: int, tokens: int) -> float | None:
        wanted = replace(self.cell, layers=layers, method=method, tokens=tokens)
        same = [r for r in self.everything if code_of(r) == self.code and r["status"] == "ok"]
        found = [r for r in same if Cell(**r["cell"]).path == wanted.path]
        return found[0]["median_seconds"] if found else None

    def deviations(self) -> list[tuple[Result, str, float]]:
        """Returns results that differ from the others at their length, with what differs and by how much."""
        found = []
        for tokens in self.lengths:
            known = [r for m in self.methods if (r := self.result(m, tokens)) is not None and r.get("losses")]
            for name, value, tolerance in _SAME:
                expected = median(value(r) for r in known) if known else 0.0
                errors = [(r, name, abs(value(r) - expected) / expected) for r in known]
                found += [wrong for wrong in errors if not wrong[2] <= tolerance]
        return found

    def longest(self, method: str) -> tuple[Result | None, Result | None]:
        """Returns the results of the longest length that was trained and of the next length, which was not."""
        fits = [tokens for tokens in self.lengths if self.finished(method, tokens)]
        most = max(fits, default=0)
        beyond = [
            t for t in self.lengths if t > most and (r := self.result(method, t)) and r["status"] != "unavailable"
        ]
        return (
            self.result(method, most) if fits else None,
            self.result(method, min(beyond)) if beyond else None,
        )


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast as another method a step of this project's strategy is, at one length.

    Attributes:
        tokens: The length.
        method: The default settings, or the fastest ones if the default has no time.
        best: The fastest method of another project.
        over_best: Ratio to that method.
        over_recomputation: Ratio to checkpointing.
        bound: Ratio to a step without recomputation and waiting; 1 means equally fast.
    """

    tokens: int
    method: str
    best: str
    over_best: float
    over_recomputation: float | None
    bound: float | None


def speedups(group: Group) -> list[Speedup]:
    """Returns the speedups at all lengths at which this project's strategy and another method were timed."""
    found = []
    for tokens in group.lengths:
        own, other = group.default(tokens) or group.best_memo(tokens), group.best_other(tokens)
        if own is not None and other is not None:
            (method, seconds), (best, best_seconds) = own, other
            recomputed, bound = group.seconds(RECOMPUTED, tokens), group.bound_seconds(tokens)
            over_recomputation = None if recomputed is None else recomputed / seconds
            over_bound = None if bound is None else bound / seconds
            found.append(Speedup(tokens, method, best, best_seconds / seconds, over_recomputation, over_bound))
    return found


def is_settled(result: Result) -> bool:
    """Returns whether all plans were in force in the timed steps, and in a step before them."""
    return bool(result["settled"] and result["steps"]["warmup"])


def code_of(result: Result) -> str:
    """Returns the commit and, if a clock measured the result, the day; only results with the same are compared."""
    commit = result.get("commit") or "commit not recorded"
    return commit if "simulated" in result else f"{result['date'][:10]}, {commit}"


def groups_of(results: Sequence[Result]) -> list[Group]:
    """Returns the groups of one device, without groups that are only measured for the bound."""
    by_name: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_name.setdefault((Cell(**result["cell"]).group, code_of(result)), []).append(result)
    groups = [Group(Cell(**found[0]["cell"]), code, found, results) for (_, code), found in sorted(by_name.items())]
    return [g for g in groups if g.cell.layers not in BOUND_LAYERS or {*g.methods} - {*BOUND_METHODS}]
