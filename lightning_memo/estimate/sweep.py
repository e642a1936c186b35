"""One table, one CSV file and the pictures over all jobs of a sweep of estimates, as a Hydra callback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memo.config import format_bytes
from lightning_memo.estimate.swept import SweptEstimate, load_jobs, swept_settings, write_csv

CSV_NAME: Final = "estimates.csv"


class SweepEstimates(Callback):
    """Prints a table of a sweep's jobs when it ends, and writes a CSV file and pictures into its folder.

    What is printed goes to stderr where the jobs print JSON.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Reads what the jobs left in the sweep's folder, and reports."""
        from lightning_memo.estimate.pictures import draw_sweep  # takes a second, and only sweeps draw

        folder = Path(config.hydra.sweep.dir)
        jobs = load_jobs(folder)
        write_csv(jobs, folder / CSV_NAME)
        files = [folder / CSV_NAME, *draw_sweep(jobs, folder)]
        console = Console(stderr=config.output == "json")
        console.print(sweep_table(jobs))
        for file in files:
            console.print(str(file), soft_wrap=True, highlight=False, markup=False)


def sweep_table(jobs: Sequence[SweptEstimate]) -> Table:
    """Returns one row for each job: what was swept and the answer; mistakes stand below."""
    names = swept_settings(jobs)
    table = Table(title="Estimates", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for name in names:
        table.add_column(name.rpartition(".")[2], justify="right", no_wrap=True)
    for title in ("tokens", "status", "TP", "CP", "DP", "PP", "ZeRO", "alpha", "step (s)", "MFU (%)", "device", "host"):
        table.add_column(title, justify="right", no_wrap=True)
    for job in jobs:
        table.add_row(*[job.setting(name) for name in names], *_cells(job))
    mistakes = [f"{job.label(names)}: {job.message}" for job in jobs if job.message]
    table.caption = Text("\n".join(mistakes)) if mistakes else None
    return table


def _cells(job: SweptEstimate) -> list[str]:
    answer = job.answer
    if answer is None:
        return ["-", "mistake", *["-"] * 10]
    numbers = {"alpha": "{:.3g}", "step_seconds": "{:.2f}", "mfu": "{:.2f}"}
    return [
        f"{answer['seq_len']:,}",
        answer["status"],
        *map(str, answer["parallel"].values()),
        *("-" if answer[name] is None else form.format(answer[name]) for name, form in numbers.items()),
        format_bytes(answer["device_bytes"]["total"]),
        format_bytes(answer["host_bytes"]),
    ]
