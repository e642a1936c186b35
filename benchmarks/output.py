"""The measurements as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from methods import CHECKPOINTING, PLAIN, SAVE_ON_CPU
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import format_bytes

Row = dict[str, Any]  # a result in the form of the JSON file

_COLUMNS = (
    "step", "x plain (least-most)", "main thread", "x plain", "step memory", "x plain", "host", "offloaded",
    "gradient error",
)  # fmt: skip
_STYLES = {PLAIN: ("s", "#444444"), CHECKPOINTING: ("^", "#c2570c"), SAVE_ON_CPU: ("D", "#7a4fa3")}
_ENGINE_STYLE = ("o", "#0b6e99")
_LABEL_WIDTH, _LABEL_HEIGHT = 75, 12  # points


def table(rows: Sequence[Row], title: str) -> Table:
    """Returns a table with one row per method, and below it the reasons why methods stopped."""
    grid = Table(title=Text(title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    grid.add_column("method", no_wrap=True)
    for name in _COLUMNS:
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(Text(row["method"]["name"]), *_cells(row))
    stopped = [f"{row['method']['name']} stopped: {row['status']}" for row in rows if row["status"] != "ok"]
    grid.caption = Text("\n".join(stopped)) if stopped else None
    return grid


def _cells(row: Row) -> list[str]:
    return [
        _text(row["median_seconds"], "{:.3f} s"),
        _text(row["ratio"], "{0[median]:.3f} ({0[min]:.3f}-{0[max]:.3f})"),
        _text(row["median_thread_seconds"], "{:.3f} s"),
        _text(row["thread_ratio"], "{0[median]:.3f}"),
        _size(row["peak_device_bytes"]),
        _text(row["peak_ratio"], "{:.3f}"),
        _size(row["host_bytes"]),
        _size(row["offloaded_bytes"]),
        _text(row["gradient_error"], "{:.1e}"),
    ]


def _text(value: Any, template: str) -> str:
    return "-" if value is None else template.format(value)


def _size(size_bytes: int | None) -> str:
    return format_bytes(size_bytes) if size_bytes else "-"


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws the timed methods by memory and time, and the memory of each measured method.

    Args:
        rows: The results. Without times of plain training, seconds are used instead of ratios.
        title: What was measured.
        path: The PNG file to write.
    """
    metered = [row for row in rows if row["peak_device_bytes"] is not None]
    largest = max((max(row["peak_device_bytes"], row["host_bytes"]) for row in metered), default=0)
    unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_memory(right, metered, *unit)
    _draw_time_over_memory(left, [row for row in metered if row["seconds"]], *unit)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=120)


def _draw_time_over_memory(axes: Axes, rows: Sequence[Row], unit_bytes: int, unit: str) -> None:
    relative = all(row["ratio"] for row in rows)
    labels, swept = [], []
    for row in rows:
        method = row["method"]
        marker, color = _STYLES.get(method["name"], _ENGINE_STYLE)
        x = row["peak_device_bytes"] / unit_bytes
        y, whiskers = _time(row, relative)
        axes.errorbar(x, y, whiskers, fmt=marker, color=color, markersize=8, capsize=3, elinewidth=0.8)
        labels.append((method["name"], x, y, color))
        if method["alpha"] is not None and method["slice_tokens"] is None:
            swept.append((x, y))
    axes.plot(*zip(*sorted(swept), strict=True), color=_ENGINE_STYLE[1], alpha=0.4, zorder=1)
    axes.margins(x=0.15, y=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"step memory ({unit})")
    axes.set_ylabel("step time, relative to plain training in the same round" if relative else "step time (s)")
    axes.grid(visible=True, alpha=0.3)
    _write_labels(axes, labels)


def _write_labels(axes: Axes, labels: Sequence[tuple[str, float, float, str]]) -> None:
    """Writes the engine's names to the right of their points and other names to the left, without overlaps."""
    axes.figure.draw_without_rendering()  # places the axes
    in_points = 72 / axes.figure.dpi
    placed: list[tuple[bool, float, float]] = []
    for name, x, y, color in sorted(labels, key=lambda label: label[2]):
        right = name not in _STYLES
        left, height = axes.transData.transform((x, y)) * in_points
        above = [h for side, at, h in placed if side == right and abs(at - left) < _LABEL_WIDTH]
        lowest = max([height - 3, *(h + _LABEL_HEIGHT for h in above)])
        placed.append((right, left, lowest))
        axes.annotate(
            name, (x, y), xytext=(18 if right else -12, lowest - height), textcoords="offset points", fontsize=9,
            color=color, horizontalalignment="left" if right else "right",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.4, "linewidth": 0.8},
        )  # fmt: skip


def _time(row: Row, relative: bool) -> tuple[float, list[list[float]] | None]:
    """Returns the height of a point, and the lengths of its lower and upper error bars."""
    if not relative:
        return row["median_seconds"], None
    ratio = row["ratio"]
    return ratio["median"], [[ratio["median"] - ratio["min"]], [ratio["max"] - ratio["median"]]]


def _draw_memory(axes: Axes, rows: Sequence[Row], unit_bytes: int, unit: str) -> None:
    for shift, key, color, label in (
        (-0.2, "peak_device_bytes", _ENGINE_STYLE[1], "step memory"),
        (0.2, "host_bytes", "#b9d6e2", "host"),
    ):
        places = [number + shift for number in range(len(rows))]
        axes.barh(places, [row[key] / unit_bytes for row in rows], 0.38, color=color, label=label)
    axes.set_yticks(range(len(rows)), [row["method"]["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"memory ({unit})")
    axes.set_title(" ")  # room for the legend
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="x", alpha=0.3)
