"""Draws the results of all jobs of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_memo.cli.run_summary import RunSummary
from lightning_memo.cli.sweeps.job_settings import differing_settings, setting_values
from lightning_memo.cli.sweeps.sweep_results import COLUMNS, Column
from lightning_memo.utils.files import replacing

_PER_ROW = 4
_LONG_LABEL_CHARACTERS = 14


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
    shown = [column for column in COLUMNS if any(column.value(run) for run in runs)]
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


def _draw_lines(axes: Any, column: Column, runs: Sequence[RunSummary], axis: str, others: Sequence[str]) -> None:
    ticks = sorted({number for run in runs if (number := _number(run, axis)) is not None})
    for line in dict.fromkeys(tuple(setting_values(run, others)) for run in runs):
        own = [run for run in runs if tuple(setting_values(run, others)) == line]
        own.sort(key=lambda run: _number(run, axis) or 0.0)
        positions = [ticks.index(number) for run in own if (number := _number(run, axis)) is not None]
        axes.plot(positions, [_height(column, run) for run in own], marker="o", label=", ".join(line))
    failed = {_number(run, axis) for run in runs if run.status == "failed"}
    texts = {_number(run, axis): setting_values(run, [axis])[0] for run in runs}
    _label_jobs(axes, [texts[tick] + ("\nfailed" if tick in failed else "") for tick in ticks])
    axes.set_xlabel(axis)


def _draw_bars(axes: Any, column: Column, runs: Sequence[RunSummary], names: Sequence[str]) -> None:
    positions = range(len(runs))
    if column.from_zero:
        axes.bar(positions, [_height(column, run) for run in runs], width=0.6)
    else:  # the length of a bar would be misleading
        axes.plot(positions, [_height(column, run) for run in runs], marker="o", linestyle="none")
    labels = [", ".join(setting_values(run, names)) + ("\nfailed" if run.status == "failed" else "") for run in runs]
    _label_jobs(axes, labels)
    axes.set_xlabel(", ".join(names))


def _label_jobs(axes: Any, labels: Sequence[str]) -> None:
    crowded = sum(map(len, labels)) > 2 * _LONG_LABEL_CHARACTERS
    axes.set_xticks(range(len(labels)), labels, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _height(column: Column, run: RunSummary) -> float:
    value = column.value(run)
    return math.nan if value is None else value / column.axis_unit


def _number(run: RunSummary, name: str) -> float | None:
    try:
        return float(setting_values(run, [name])[0])
    except ValueError:
        return None
