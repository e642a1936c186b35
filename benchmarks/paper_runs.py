"""Runs of MEMO's table 3 by method, with the parallelism of the appendix or the one that the search finds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from paper_cells import CORRECTED, Cell, appendix, rows, run_of
from paper_programs import Method, PaperEstimate, fastest

from lightning_memo.estimate import Parallelism

PEERS: Final[dict[str, Method]] = {"Memo": "memo", "Mega": "megatron", "DS": "deepspeed_ulysses"}
"""The methods, by their names in table 3."""

NAMES: Final = {"Memo": "Memo", "Mega": "Megatron-LM", "DS": "DeepSpeed"}
LISTED_FROM: Final = 64
"""Length in thousands of tokens below which the appendix lists no parallelism."""


@dataclass(frozen=True)
class Run:
    """A row of table 3 that has numbers, and its estimate."""

    row: dict[str, str]
    answer: PaperEstimate
    listed: bool
    """Whether the appendix lists the parallelism; otherwise it is the fastest that the search finds."""

    def cell(self, column: str) -> Cell:
        """Returns the cell of one of its numbers: `mfu_pct`, `tgs` or `wall_s`."""
        row, answer = self.row, self.answer
        paper = CORRECTED.get((row["model"], int(row["seq_k"]), row["method"], column), float(row[column]))
        ours = {"mfu_pct": answer.mfu, "tgs": answer.tokens_per_gpu_per_second, "wall_s": answer.step_seconds}[column]
        how = "" if self.listed else ", found"
        label = f"{row['seq_k']}K, {_sizes(answer.parallel)}{how}"
        return Cell(row["model"], label, paper, answer.status if ours is None else ours)


def _sizes(parallel: Parallelism) -> str:
    sizes = {"TP": parallel.tp, "CP": parallel.cp, "DP": parallel.dp, "PP": parallel.pp}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


@cache
def runs(peer: str) -> tuple[Run, ...]:
    """Returns all rows of a method that have numbers.

    Args:
        peer: Name of the method in table 3.
    """
    listed = _listed(peer)
    found = []
    for row in _rows(peer):
        model, seq_k = row["model"], int(row["seq_k"])
        if row["status"] == "ok":
            parallel, alpha = listed.get((model, seq_k), (None, None))
            if parallel is not None:
                answer = run_of(model, seq_k, PEERS[peer], alpha).estimate(parallel)
            else:
                answer = ranking(model, seq_k, PEERS[peer])[0]
            found.append(Run(row, answer, parallel is not None))
    return tuple(found)


def found_cells(peer: str) -> list[Cell]:
    """Returns the MFU with the fastest parallelism that the search finds, if the appendix lists one to compare with."""
    cells = []
    for run in runs(peer):
        if run.listed:
            best = ranking(run.row["model"], int(run.row["seq_k"]), PEERS[peer])[0]
            cells.append(Run(run.row, best, listed=False).cell("mfu_pct"))
    return cells


def without_recomputation() -> list[Cell]:
    """Returns the MFU of Megatron-LM without recomputation, for rows that the appendix does not cover."""
    cells = []
    for run in runs("Mega"):
        model, seq_k = _key(run.row)
        if seq_k < LISTED_FROM:
            cells.append(Run(run.row, ranking(model, seq_k, "plain")[0], listed=False).cell("mfu_pct"))
    return cells


@cache
def ranking(model: str, seq_k: int, method: Method) -> tuple[PaperEstimate, ...]:
    """Returns all parallelisms without pipelines, the best first; DeepSpeed always ran with ZeRO 3."""
    run, zero_stage = run_of(model, seq_k, method), 3 if method == "deepspeed_ulysses" else None
    return tuple(fastest(list(map(run.estimate, run.parallelisms(zero_stage)))))


def statuses(peer: str) -> list[Cell]:
    """Returns whether any parallelism fits, for the rows of table 3 that the appendix covers."""
    return [
        Cell(row["model"], f"{row['seq_k']}K", row["status"], "ok" if _fits(*_key(row), PEERS[peer]) else "oom")
        for row in _rows(peer)
        if int(row["seq_k"]) >= LISTED_FROM
    ]


def _fits(model: str, seq_k: int, method: Method) -> bool:
    return ranking(model, seq_k, method)[0].status == "ok"


def ranks() -> list[Cell]:
    """Returns the rank of the paper's parallelism among the fastest that fit; 0 if it is not among them."""
    cells = []
    for model, seq_k, parallel, _ in appendix():
        if parallel is not None:
            answers = ranking(model, seq_k, "memo")
            places = [_divided(answer.parallel) for answer in answers if answer.status == "ok"]
            wanted = _divided(parallel)
            place = places.index(wanted) + 1 if wanted in places else 0
            cells.append(Cell(model, f"{seq_k}K, {_sizes(parallel)}", 1, place))
    return cells


def _divided(parallel: Parallelism) -> tuple[int, ...]:
    return parallel.tp, parallel.cp, parallel.dp, parallel.pp


def _rows(peer: str) -> list[dict[str, str]]:
    """Reads the rows of table 3, the smaller model first."""
    mine = [row for row in rows("memo_table3_sigmod") if row["method"] == peer]
    return sorted(mine, key=lambda row: row["model"] != "7B")


def _key(row: dict[str, str]) -> tuple[str, int]:
    return row["model"], int(row["seq_k"])


def _listed(peer: str) -> dict[tuple[str, int], tuple[Parallelism, float | None]]:
    """Reads the parallelism and alpha of the appendix, by model and thousands of tokens."""
    if peer == "Memo":
        return {(model, seq_k): (parallel, alpha) for model, seq_k, parallel, alpha in appendix() if parallel}
    table = rows({"Mega": "memo_app_table6_megatron", "DS": "memo_app_table5_deepspeed"}[peer])
    return {_key(row): (_parallel(row), None) for row in table if row["status"] == "ok"}


def _parallel(row: dict[str, str]) -> Parallelism:
    if "SP" in row:
        return Parallelism(cp=int(row["SP"]), dp=int(row["DP"]), zero_stage=int(row["ZeRO"]))
    return Parallelism(tp=int(row["TP"]), cp=int(row["CP"]), dp=int(row["DP"]), pp=int(row["PP"]), zero_stage=1)
