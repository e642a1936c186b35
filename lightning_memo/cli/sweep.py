"""Sweeps of training runs: a Hydra callback that prepares their folder, and shows all jobs in a table and a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memo.cli.hydra_command import exit_for_user
from lightning_memo.cli.run_folder import SUMMARY_FILE, RunSummary, differing_settings, setting_values
from lightning_memo.cli.step_stats import METERED_STEP
from lightning_memo.reports.run_page import literal
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import format_bytes

PICTURE_FILE = "sweep.png"
_WIDTH = 140
_PER_ROW = 4
_LONG_LABEL_CHARACTERS = 14

_LAST = "last"
_COMMAND_FILE = "multirun.yaml"  # Hydra's record of the sweep's command
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


class SweepReport(Callback):
    """Prints a table of a sweep's jobs when it ends, and draws ``sweep.png`` into its folder."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks that the sweep can start or continue in its folder.

        Raises:
            SystemExit: It cannot; the status is 2. Hydra turns other exceptions into warnings.
        """
        try:
            _prepare_sweep_folder(config)
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
    for column in _COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for run in runs:
        values = [(column, column.value(run)) for column in _COLUMNS]
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


def draw_sweep(runs: Sequence[RunSummary], path: Path) -> None:
    """Draws one diagram for each result that is not zero in all jobs.

    The x axis is the numeric setting with the most values, with one line for each combination of the other settings.
    Without a numeric setting, each job has a bar. Failed jobs leave gaps.

    Args:
        runs: Summaries of the jobs, at least one of which succeeded.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure  # the import takes a second, and only sweeps need it

    names = differing_settings(runs)
    numeric = [name for name in names if all(_number(run, name) is not None for run in runs)]
    axis = max(numeric, key=lambda name: len({_number(run, name) for run in runs}), default=None)
    shown = [column for column in _COLUMNS if any(column.value(run) for run in runs)]
    rows = math.ceil(len(shown) / _PER_ROW)
    figure = Figure(figsize=(3.6 * _PER_ROW, 3 * rows + 0.4), layout="constrained")
    for place, column in enumerate(shown, 1):
        axes = figure.add_subplot(rows, _PER_ROW, place)
        if axis is None:
            _draw_bars(axes, column, runs, names)
        else:
            _draw_lines(axes, column, runs, axis, [name for name in names if name != axis])
        axes.set_title(column.axis or column.title)
        axes.grid(visible=True, axis="y", alpha=0.3)
        if column.from_zero:
            axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), _PER_ROW), frameon=False)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=120)


@dataclass(frozen=True)
class _Column:
    """A result that the table and the picture show."""

    title: str
    value: Callable[[RunSummary], float | None]
    text: Callable[[float], str]
    axis: str | None = None
    """Title in the picture, if it differs from the table's."""
    axis_unit: float = 1
    from_zero: bool = True
    """Whether the axis in the picture starts at zero."""


_COLUMNS = (
    _Column("step (s)", lambda run: run.step_seconds, "{:.3f}".format, "step time (s)"),
    _Column("tokens/s", lambda run: run.tokens_per_second, "{:,.0f}".format, "tokens per second"),
    _Column("step memory", lambda run: run.step_memory_bytes, format_bytes, "step memory on the device (MiB)", 2**20),
    _Column("host", lambda run: run.host_bytes, format_bytes, "swapped to the host (MiB)", 2**20),
    _Column("alpha", lambda run: run.alpha, "{:.2f}".format),
    _Column("train loss", lambda run: run.train_loss, "{:.3f}".format, "train loss (nats)", from_zero=False),
    _Column("val loss", lambda run: run.val_loss, "{:.3f}".format, "validation loss (nats)", from_zero=False),
)


def _draw_lines(axes: Any, column: _Column, runs: Sequence[RunSummary], axis: str, others: Sequence[str]) -> None:
    ticks = sorted({number for run in runs if (number := _number(run, axis)) is not None})
    for line in dict.fromkeys(tuple(setting_values(run, others)) for run in runs):
        own = [run for run in runs if tuple(setting_values(run, others)) == line]
        own.sort(key=lambda run: _number(run, axis) or 0.0)
        positions = [ticks.index(number) for run in own if (number := _number(run, axis)) is not None]
        axes.plot(positions, [_height(column, run) for run in own], marker="o", label=literal(", ".join(line)))
    failed = {_number(run, axis) for run in runs if run.status == "failed"}
    texts = {_number(run, axis): setting_values(run, [axis])[0] for run in runs}
    _label_jobs(axes, [literal(texts[tick]) + ("\nfailed" if tick in failed else "") for tick in ticks])
    axes.set_xlabel(literal(axis))


def _draw_bars(axes: Any, column: _Column, runs: Sequence[RunSummary], names: Sequence[str]) -> None:
    positions = range(len(runs))
    if column.from_zero:
        axes.bar(positions, [_height(column, run) for run in runs], width=0.6)
    else:  # the length of a bar would be misleading
        axes.plot(positions, [_height(column, run) for run in runs], marker="o", linestyle="none")
    labels = [
        literal(", ".join(setting_values(run, names))) + ("\nfailed" if run.status == "failed" else "") for run in runs
    ]
    _label_jobs(axes, labels)
    axes.set_xlabel(literal(", ".join(names)))


def _label_jobs(axes: Any, labels: Sequence[str]) -> None:
    crowded = sum(map(len, labels)) > 2 * _LONG_LABEL_CHARACTERS
    axes.set_xticks(range(len(labels)), labels, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _height(column: _Column, run: RunSummary) -> float:
    value = column.value(run)
    return math.nan if value is None else value / column.axis_unit


def _number(run: RunSummary, name: str) -> float | None:
    try:
        return float(setting_values(run, [name])[0])
    except ValueError:
        return None


def _prepare_sweep_folder(config: DictConfig) -> None:
    """Prepares the folder of a sweep that starts or continues, and makes the link `last` point to a new folder.

    Args:
        config: Configuration of the sweep, including Hydra's section.

    Raises:
        ValueError: `sweep` has several values, or is `last` without an earlier sweep, or the folder contains the
            results of other jobs.
    """
    folder = Path(config.hydra.sweep.dir)
    overrides = _parsed(config)
    if any(override.get_key_element() == "sweep" and override.is_sweep_override() for override in overrides):
        raise ValueError("sweep: give one name, because all jobs of a sweep share one folder")
    last = folder.with_name(_LAST)
    if folder == last:
        if not folder.is_dir():
            raise ValueError(f"sweep={_LAST}: no sweep in {folder.parent}; give the name=... of an earlier one")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if last.is_symlink() or not last.exists():
            _link(last, folder.name)
    if (folder / _COMMAND_FILE).is_file():
        _check_jobs(OmegaConf.load(folder / _COMMAND_FILE), config, folder)


def _link(link: Path, target: str) -> None:
    unfinished = link.with_name(f".{_LAST}.{target}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(link)


def _check_jobs(earlier: Any, config: DictConfig, folder: Path) -> None:
    """Refuses a sweep that would give the number of an earlier job, which names its folder, to another job."""
    if config.hydra.sweeper._target_ != _BASIC_SWEEPER or earlier.hydra.sweeper._target_ != _BASIC_SWEEPER:
        raise ValueError(
            f"sweep={folder.name}: only sweeps of Hydra's basic sweeper can be continued; start a new sweep"
        )
    before, now = _jobs(earlier), _jobs(config)
    for number, old in enumerate(before):
        new = now[number] if number < len(now) else None
        if old != new:
            was = _differing(old, before if new is None else [new])
            would_be = "missing" if new is None else _differing(new, [old])
            raise ValueError(
                f"sweep={folder.name}: job {number} was {was}, but would now be {would_be}; repeat the same command, "
                "add new values after all earlier ones, or start a new sweep"
            )


def _differing(job: dict[str, str], others: list[dict[str, str]]) -> str:
    """The settings of a job that differ from at least one of the others, as text."""
    names = [name for name in job if any(other.get(name) != job[name] for other in others)]
    return " ".join(f"{name}={job[name]}" for name in names) or "without it"


def _jobs(config: DictConfig) -> list[dict[str, str]]:
    """The settings of each job, in the order of Hydra's basic sweeper."""
    values: dict[str, list[str]] = {}
    for override in _parsed(config):
        name = override.get_key_element()
        swept = override.is_sweep_override()
        values[name] = list(override.sweep_string_iterator()) if swept else [override.get_value_element_as_str()]
    values.pop("sweep", None)
    return [dict(zip(values, job, strict=True)) for job in itertools.product(*values.values())]


def _parsed(config: DictConfig) -> list[Any]:
    params = config.hydra.sweeper.get("params") or {}
    given = [*(f"{name}={value}" for name, value in params.items()), *config.hydra.overrides.task]
    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(given)
