"""Where a sweep begins or goes on, and one table and one picture over all its jobs, as a Hydra callback."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memo.cli import exit_for_user
from lightning_memo.config import format_bytes
from lightning_memo.files import replacing
from lightning_memo.summary import FILE_NAME, RunSummary
from lightning_memo.sweeps import folder as sweep_folder

PICTURE_NAME = "sweep.png"


@dataclass(frozen=True)
class Column:
    """A result that the table and the picture show."""

    title: str
    value: Callable[[RunSummary], float | None]
    text: Callable[[float], str]
    axis: str | None = None
    """Title in the picture, where it is another."""
    axis_unit: float = 1
    from_zero: bool = True
    """Whether the picture's axis begins at zero."""


COLUMNS = (
    Column("step (s)", lambda run: run.step_seconds, "{:.3f}".format, "step time (s)"),
    Column("tokens/s", lambda run: run.tokens_per_second, "{:,.0f}".format, "tokens per second"),
    Column("device peak", lambda run: run.peak_device_bytes, format_bytes, "device peak (MiB)", 2**20),
    Column("host", lambda run: run.host_bytes, format_bytes, "swapped to the host (MiB)", 2**20),
    Column("alpha", lambda run: run.alpha, "{:.2f}".format),
    Column("train loss", lambda run: run.train_loss, "{:.3f}".format, "train loss (nats)", from_zero=False),
    Column("val loss", lambda run: run.val_loss, "{:.3f}".format, "validation loss (nats)", from_zero=False),
)
PER_ROW = 4
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
        folder = Path(config.hydra.sweep.dir)
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


def swept_settings(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the names of the settings that differ between the jobs."""
    settings = [dict(override.split("=", 1) for override in run.overrides) for run in runs]
    names = dict.fromkeys(name for job in settings for name in job)
    return [name for name in names if len({job.get(name) for job in settings}) > 1]


def sweep_table(runs: Sequence[RunSummary]) -> Table:
    """Returns one row per job, what was swept and the results, and below why jobs failed."""
    names = swept_settings(runs)
    table = Table(title="Sweep", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for name in names:
        table.add_column(name.rpartition(".")[2], justify="right", overflow="fold")
    for column in COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for run in runs:
        values = [(column, column.value(run)) for column in COLUMNS]
        cells = ["-" if value is None else column.text(value) for column, value in values]
        table.add_row(*_setting_values(run, names), *cells)
    failures = [f"{_label(run, names)} failed: {run.message}" for run in runs if run.status == "failed"]
    table.caption = Text("\n".join(failures)) if failures else None
    return table


def draw(runs: Sequence[RunSummary], path: Path) -> None:
    """Draws each result that is not zero throughout over what was swept; failed jobs leave gaps.

    Args:
        runs: The jobs, at least one of which succeeded.
        path: The PNG to write.
    """
    from matplotlib.figure import Figure  # takes a second, and only sweeps draw

    names = swept_settings(runs)
    labels = [", ".join(_setting_values(run, names)) + ("\nfailed" if run.status == "failed" else "") for run in runs]
    shown = [column for column in COLUMNS if any(column.value(run) for run in runs)]
    rows = math.ceil(len(shown) / PER_ROW)
    figure = Figure(figsize=(3.6 * PER_ROW, 3 * rows), layout="constrained")
    for place, column in enumerate(shown, 1):
        axes = figure.add_subplot(rows, PER_ROW, place)
        _draw_column(axes, column, runs, labels)
        axes.set_xlabel(", ".join(names))
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=120)


def _draw_column(axes: Any, column: Column, runs: Sequence[RunSummary], labels: Sequence[str]) -> None:
    values = [column.value(run) for run in runs]
    positions = range(len(runs))
    axes.plot(positions, [math.nan if value is None else value / column.axis_unit for value in values], marker="o")
    axes.set_xticks(positions, labels, rotation=20 if max(map(len, labels)) > 14 else 0)
    axes.set_xlim(-0.3, len(runs) - 0.7)
    axes.set_title(column.axis or column.title)
    axes.grid(visible=True, alpha=0.3)
    if column.from_zero:
        axes.set_ylim(0, 1.1 * axes.dataLim.y1)


def _label(run: RunSummary, names: Sequence[str]) -> str:
    values = _setting_values(run, names)
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _setting_values(run: RunSummary, names: Sequence[str]) -> list[str]:
    settings = dict(override.split("=", 1) for override in run.overrides)
    return [settings.get(name, "-") for name in names]
