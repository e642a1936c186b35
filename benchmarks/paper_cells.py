"""Cells of the papers' tables as runs of the papers' programs, and the known errors of the papers."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from paper_programs import A800, Method, PaperEstimate, PaperRun, program_bytes

from lightning_memo.estimate import ModelShape, Parallelism, constants_of, load_cluster, load_model
from lightning_memo.estimate.device_bytes import model_state_bytes

TABLES = Path(__file__).parent.parent / "tests" / "reference" / "papers"
BATCH_SIZE = 16
GPUS = {"7B": 8, "13B": 16, "30B": 32, "65B": 64}
MODELS = ("7B", "13B")
"""Models whose cells are known here."""

ABLATION = Parallelism(tp=4, cp=2, zero_stage=1)
"""Tables 4 and 5 of MEMO: 7B on 8 GPUs."""

ERRORS = {
    ("SIGMOD table 3", "7B", 896): "251.98 tokens/GPU/s should be 215.98, as arXiv has it; the MFU is right",
    ("table 3, Megatron", "13B", 640): "an MFU of 19.41 % contradicts 83.94 tokens/GPU/s, which are 23.74 %",
    ("SIGMOD table 3, Megatron", "13B", 640): "2h10s should be 2h10m",
    ("table 3, DeepSpeed", "7B", 64): "935.76 tokens/GPU/s are 27.42 %, not 27.95 %",
    ("appendix, table 6", "7B", 512): "out of memory there, but table 3 has an MFU, which is used",
    ("appendix, table 6", "7B", 640): "out of memory there, but table 3 has an MFU, which is used",
    ("section 1", "7B", 1024): "input tensors of 128 GB, and 16 GB per GPU, should be 256 and 32 GiB",
}
"""Errors of the papers by table, model and thousands of tokens.

None of these cells is fitted, and none is an MFU of MEMO's own rows.
"""

CORRECTED = {
    ("7B", 896, "Memo", "tgs"): 215.98,
    ("13B", 640, "Mega", "mfu_pct"): 23.74,
    ("13B", 640, "Mega", "wall_s"): 7800.0,
    ("7B", 64, "DS", "tgs"): 953.8,
}
"""Corrected values of table 3, for cells in which two of the three numbers contradict the third."""

ABLATIONS: dict[str, Method] = {
    "Full Recomputation": "megatron",
    "Full Recomputation + Memory Plan": "full_recompute",
    "Full Swapping + Memory Plan": "full_swap",
    "Memo (Fine-grained Management + Memory Plan)": "memo",
}
FPDT_LENGTHS = (128, 256, 512, 1024, 2048, 3072, 4096, 8192)
"""Lengths in FPDT's table 1, in thousands of tokens."""


@dataclass(frozen=True)
class Cell:
    """One cell: the paper's value and ours."""

    table: str
    row: str
    paper: Any
    ours: Any


def rows(name: str) -> list[dict[str, str]]:
    with (TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def shape_of(model: str) -> ModelShape:
    """Returns a model of MEMO or FPDT: 2.7B is GPT-3's, 8B is Llama 3's, 13B is MEMO's 13B."""
    if model == "2.7B":
        gpt = load_model("gpt_7b")
        return replace(gpt, name="gpt_2_7b", layers=32, hidden=2560, ffn=10240, heads=32, kv_heads=32, head_dim=80)
    return load_model("llama3_8b" if model == "8B" else f"gpt_{model.lower()}")


def run_of(model: str, seq_k: int, method: Method = "memo", alpha: float | None = None) -> PaperRun:
    """Returns the run of one of MEMO's cells."""
    return PaperRun(
        shape=shape_of(model),
        cluster=load_cluster("a800"),
        constants=A800,
        method=method,
        gpus=GPUS[model],
        seq_len=seq_k * 1024,
        batch_size=BATCH_SIZE,
        alpha=alpha,
    )


def appendix() -> list[tuple[str, int, Parallelism | None, float | None]]:
    """Reads table 7 of MEMO: model, thousands of tokens, parallelism and alpha (both None if out of memory)."""
    cells: list[tuple[str, int, Parallelism | None, float | None]] = []
    for row in rows("memo_app_table7_memo"):
        parallel, alpha = None, None
        if row["status"] == "ok":
            sizes = {name: int(row[name.upper()]) for name in ("tp", "cp", "dp", "pp")}
            parallel, alpha = Parallelism(**sizes, zero_stage=1), float(row["alpha"])
        cells.append((row["model"], int(row["seq_k"]), parallel, alpha))
    return cells


@dataclass(frozen=True)
class MfuCell:
    """A cell with an MFU, or with a status if there is none, and its run."""

    table: str
    row: str
    paper: Any
    run: PaperRun
    parallel: Parallelism

    @property
    def cell(self) -> Cell:
        answer = self.run.estimate(self.parallel)
        return Cell(self.table, self.row, self.paper, answer.mfu if answer.status == "ok" else answer.status)


def table3() -> list[MfuCell]:
    """Returns the MFU of Memo with the parallelism and alpha of the appendix."""
    mfu = {(r["model"], int(r["seq_k"])): r["mfu_pct"] for r in rows("memo_table3_sigmod") if r["method"] == "Memo"}
    return [
        MfuCell(model, f"{seq_k}K", float(mfu[model, seq_k]), run_of(model, seq_k, alpha=alpha), parallel)
        for model, seq_k, parallel, alpha in appendix()
        if parallel is not None
    ]


def table4() -> list[MfuCell]:
    """Returns the cells of the ablation."""
    alphas = {seq_k: alpha for model, seq_k, _, alpha in appendix() if model == "7B"}
    cells = []
    for row in rows("memo_table4_ablation"):
        if row["source"] == "sigmod":
            method, seq_k = ABLATIONS[row["method"]], int(row["seq_k"])
            run = run_of("7B", seq_k, method, alphas[seq_k] if method == "memo" else None)
            cells.append(MfuCell(row["method"], f"{seq_k}K", _mfu_or_status(row), run, ABLATION))
    return cells


def table5() -> list[MfuCell]:
    """Returns the cells of the sweep over alpha."""
    return [
        MfuCell(
            f"{row['seq_k']}K",
            f"alpha {float(row['alpha']):g}",
            _mfu_or_status(row),
            run_of("7B", int(row["seq_k"]), alpha=float(row["alpha"])),
            ABLATION,
        )
        for row in rows("memo_table5_alpha_sweep")
    ]


def _mfu_or_status(row: dict[str, str]) -> float | str:
    return float(row["mfu_pct"]) if row["status"] == "ok" else row["status"]


def mfu_cells() -> list[MfuCell]:
    """Returns all cells that have an MFU."""
    return [cell for cell in (*table3(), *table4(), *table5()) if isinstance(cell.paper, float)]


def zero_table() -> list[Cell]:
    """Returns ZeRO's table 1: decimal GB of the model state on a device."""
    sizes = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
    return [
        Cell(
            row["model"],
            f"{row['dp']} GPUs, stage {row['zero_stage']}",
            float(row["gb"]),
            model_state_bytes(sizes[row["model"]], int(row["dp"]), int(row["zero_stage"]), program_bytes()).total / 1e9,
        )
        for row in rows("zero_memory")
    ]


def alphas() -> list[Cell]:
    """Compares the appendix's alphas with those chosen for its parallelism."""
    return [
        Cell(model, f"{seq_k}K", alpha, run_of(model, seq_k).estimate(parallel).alpha)
        for model, seq_k, parallel, alpha in appendix()
        if parallel is not None
    ]


def alphas_of_program() -> list[Cell]:
    """Does the same with the linear program's alpha, rounded down to eighths, as all of the paper's alphas are."""
    cells = []
    for model, seq_k, parallel, alpha in appendix():
        if parallel is not None:
            limit = run_of(model, seq_k).solved_alpha(parallel)
            cells.append(Cell(model, f"{seq_k}K", alpha, math.floor(8 * limit) / 8))
    return cells


def fpdt_lengths() -> list[Cell]:
    """Returns the longest of FPDT's lengths that fits, in thousands of tokens (0: none), with one sequence, ZeRO 3."""
    cells = []
    for row in rows("fpdt_table1_maxlen"):
        gpus = int(row["n_gpus"])
        fitting = [seq_k for seq_k in FPDT_LENGTHS if _fpdt(row, seq_k).status == "ok"]
        longest = max(fitting, default=0)
        paper = int(row["max_seq_k"] or 0)
        if row["only_tested_to"] == "1":
            longest = min(longest, paper)
        cells.append(Cell(f"{row['model']}, {row['gpu']}", f"{gpus} GPUs", paper, longest))
    return cells


def fpdt_table3() -> tuple[dict[str, str], PaperEstimate]:
    """Returns FPDT's own row of its table 3 and its estimate (Llama 8B, 8 A100-80G). Only its length is in table 1."""
    row = max(rows("fpdt_table3_llama8b_8gpu"), key=lambda row: int(row["max_seq_k"]))
    return row, _fpdt({"model": "8B", "gpu": "A100-80G", "n_gpus": "8"}, int(row["max_seq_k"]))


def _fpdt(row: dict[str, str], seq_k: int) -> PaperEstimate:
    cluster = row["gpu"].lower().replace("-", "_").removesuffix("g")
    gpus = int(row["n_gpus"])
    run = PaperRun(
        shape=shape_of(row["model"]),
        cluster=load_cluster(cluster),
        constants=constants_of(cluster),
        method="fpdt",
        gpus=gpus,
        seq_len=seq_k * 1024,
        batch_size=1,
    )
    return run.estimate(Parallelism(cp=gpus, zero_stage=3))
