"""Hydra callback that prepares a sweep's folder, and shows all its jobs in one table and one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memo.callbacks.step_stats import METERED_STEP
from lightning_memo.cli.hydra_command import exit_for_user
from lightning_memo.cli.run_summary import SUMMARY_FILE, RunSummary
from lightning_memo.cli.sweeps.job_settings import differing_settings, setting_values
from lightning_memo.cli.sweeps.sweep_folder import prepare_sweep_folder
from lightning_memo.cli.sweeps.sweep_picture import draw_sweep
from lightning_memo.cli.sweeps.sweep_results import COLUMNS

PICTURE_FILE = "sweep.png"
_WIDTH = 140


class SweepReport(Callback):
    """Prints a table of a sweep's jobs when it ends, and draws ``sweep.png`` into its folder."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks that the sweep can start or continue in its folder.

        Raises:
            SystemExit: It cannot; the status is 2. Hydra turns other exceptions into warnings.
        """
        try:
            prepare_sweep_folder(config)
        except Exception as error:
            exit_for_user(error)
            raise

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Shows the results of all jobs in the sweep's folder.

        Raises:
            SystemExit: A job failed; the status is 1.
        """
        folder = Path(config.hydra.sweep.dir).resolve()  # the link `last` may point to another sweep later
        runs = load_runs(folder)
        console = Console()
        if not console.is_terminal:  # for a file or a pipe, rich assumes a width of 80
            console.width = max(console.width, _WIDTH)
        console.print(sweep_results_table(runs))
        if any(run.status == "ok" for run in runs):
            draw_sweep(runs, folder / PICTURE_FILE)
            console.print(f"Picture of the sweep: {folder / PICTURE_FILE}", soft_wrap=True, highlight=False)
        if any(run.status == "failed" for run in runs):
            raise SystemExit(1)


def load_runs(folder: Path) -> list[RunSummary]:
    """Returns the summaries in the order of the jobs' numbers."""
    jobs = sorted((path.parent for path in folder.glob(f"*/{SUMMARY_FILE}")), key=lambda job: (len(job.name), job.name))
    return [RunSummary.load(job) for job in jobs]


def sweep_results_table(runs: Sequence[RunSummary]) -> Table:
    """Returns a table with the differing settings and the results of each job, and reasons for missing results."""
    names = differing_settings(runs)
    table = Table(title="Sweep", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for name in names:
        table.add_column(name.rpartition(".")[2], justify="right", overflow="fold")
    for column in COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for run in runs:
        values = [(column, column.value(run)) for column in COLUMNS]
        cells = ["-" if value is None else column.text(value) for column, value in values]
        table.add_row(*setting_values(run, names), *cells)
    notes = [f"{_label(run, names)} failed: {run.message}" for run in runs if run.status == "failed"]
    done = [run for run in runs if run.status == "ok"]
    if any(run.step_seconds is None for run in done):
        notes.append(f"step (s) -: the first {METERED_STEP + 1} steps of a run are not timed")
    if any(run.val_loss is None for run in done):
        notes.append("val loss -: no validation until trainer.max_steps (trainer.val_check_interval)")
    table.caption = Text("\n".join(notes)) if notes else None
    return table


def _label(run: RunSummary, names: Sequence[str]) -> str:
    values = setting_values(run, names)
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
