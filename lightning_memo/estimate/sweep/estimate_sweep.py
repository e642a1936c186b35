"""Hydra callback that writes a table, a CSV file and pictures of all jobs of a sweep of estimates."""

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

from lightning_memo.cli.sweeps.job_settings import differing_settings, setting_values
from lightning_memo.estimate.step.activation_fractions import format_alpha
from lightning_memo.estimate.sweep.job_estimates import JobEstimate, load_estimates, write_csv
from lightning_memo.utils.units import format_bytes

CSV_FILE: Final = "estimates.csv"
_WIDTH: Final = 140


class EstimateSweep(Callback):
    """Prints a table of all jobs at the end of a sweep, and writes a CSV file and pictures into its folder.

    The table goes to stderr if the jobs print JSON.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Shows the results of all jobs in the sweep's folder."""
        from lightning_memo.estimate.sweep.estimate_pictures import (
            draw_estimates,  # the import takes a second, and only sweeps need it
        )

        folder = Path(config.hydra.sweep.dir)
        jobs = load_estimates(folder)
        write_csv(jobs, folder / CSV_FILE)
        files = [folder / CSV_FILE, *draw_estimates(jobs, folder)]
        console = Console(stderr=config.output == "json")
        if not console.is_terminal:  # for a file or a pipe, rich assumes a width of 80
            console.width = max(console.width, _WIDTH)
        console.print(estimates_table(jobs))
        for file in files:
            console.print(str(file), soft_wrap=True, highlight=False, markup=False)


def estimates_table(jobs: Sequence[JobEstimate]) -> Table:
    """Returns a table with the differing settings and the estimate of each job, and the errors below."""
    names = differing_settings(jobs)
    table = Table(title="Estimates", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for name in names:
        table.add_column(name.rpartition(".")[2], justify="right", no_wrap=True)
    has_length = all("seq_len" in names and not job.longest for job in jobs)
    titles = ("status", "tp/cp/dp/pp", "EP", "ZeRO", "alpha", "step (s)", "MFU (%)", "device", "host")
    for title in titles if has_length else ("tokens", *titles):
        table.add_column(title, justify="right", no_wrap=True)
    for job in jobs:
        length = [] if has_length else [f"{job.answer['seq_len']:,}" if job.answer else "-"]
        table.add_row(*setting_values(job, names), *length, *_cells(job))
    speeds = dict.fromkeys(f"Speeds: {job.answer['speeds']}" for job in jobs if job.answer and job.answer["speeds"])
    lines = [*speeds, *(f"{job.label(names)}: {job.message}" for job in jobs if job.message)]
    table.caption = Text("\n".join(lines)) if lines else None
    return table


def _cells(job: JobEstimate) -> list[str]:
    answer = job.answer
    if answer is None:
        return ["error", *["-"] * 8]
    numbers = {"step_seconds": "{:.1f}", "mfu": "{:.1f}"}
    return [
        answer["status"],
        "{tp}/{cp}/{dp}/{pp}".format(**answer["parallel"]),
        str(answer["parallel"]["expert_parallel_size"]),
        str(answer["parallel"]["zero_stage"]),
        format_alpha(answer["alpha"], answer["device_bytes"], answer["storage"]),
        *("-" if answer[name] is None else form.format(answer[name]) for name, form in numbers.items()),
        format_bytes(answer["device_bytes"]["total"]),
        format_bytes(answer["host_bytes"]),
    ]
