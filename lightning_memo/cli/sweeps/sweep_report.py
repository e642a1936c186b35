"""Where a sweep begins or goes on, and one table and one picture over all its jobs, as a Hydra callback."""

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
from lightning_memo.cli.run_summary import FILE_NAME, RunSummary
from lightning_memo.cli.sweeps import sweep_folder
from lightning_memo.cli.sweeps.sweep_picture import draw
from lightning_memo.cli.sweeps.sweep_results import COLUMNS, setting_values, swept_settings

PICTURE_NAME = "sweep.png"
_WIDTH = 140


class SweepReport(Callback):
    """Prints a table of a sweep's jobs when it ends, and draws ``sweep.png`` into its folder."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks whether the sweep can begin or go on in its folder.

        Raises:
            SystemExit: It can't, with status 2; Hydra would make a warning of other exceptions.
        """
        try:
            sweep_folder.enter(config)
        except Exception as error:
            exit_for_user(error)
            raise

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Reads what the jobs left in the sweep's folder, and reports.

        Raises:
            SystemExit: A job failed, with status 1.
        """
        folder = Path(config.hydra.sweep.dir).resolve()  # `last` may lead elsewhere tomorrow
        runs = load_runs(folder)
        console = Console()
        if not console.is_terminal:  # a file or a pipe has no width; without one rich takes 80
            console.width = max(console.width, _WIDTH)
        console.print(sweep_table(runs))
        if any(run.status == "ok" for run in runs):
            draw(runs, folder / PICTURE_NAME)
            console.print(f"Picture of the sweep: {folder / PICTURE_NAME}", soft_wrap=True, highlight=False)
        if any(run.status == "failed" for run in runs):
            raise SystemExit(1)


def load_runs(folder: Path) -> list[RunSummary]:
    """Returns the summaries in the order of the jobs' numbers."""
    jobs = sorted((path.parent for path in folder.glob(f"*/{FILE_NAME}")), key=lambda job: (len(job.name), job.name))
    return [RunSummary.load(job) for job in jobs]


def sweep_table(runs: Sequence[RunSummary]) -> Table:
    """Returns one row per job, what was swept and the results, and below why jobs failed or lack results."""
    names = swept_settings(runs)
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
