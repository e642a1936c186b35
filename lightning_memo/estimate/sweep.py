"""Estimates of the jobs of a sweep, and the table, CSV file and pictures that a Hydra callback makes of them."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memo.cli.run_folder import differing_settings, setting_values
from lightning_memo.estimate.request import Method
from lightning_memo.estimate.tables import format_alpha
from lightning_memo.reports.run_page import literal
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ESTIMATE_FILE: Final = "estimate.json"

CSV_FILE: Final = "estimates.csv"
_WIDTH: Final = 140
BYTES_FILE, MFU_FILE, LONGEST_FILE = "device_bytes.png", "mfu.png", "longest.png"
# The palette of Okabe and Ito, which color-blind people can distinguish, with grey and black.
_BLUE, _ORANGE, _GREEN, _RED, _PINK, _SKY, _YELLOW, _GREY, _BLACK = _COLORS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#7f7f7f", "#000000"
)  # fmt: skip
CATEGORY_COLORS: Final = {
    "parameters": _BLUE, "gradients": _ORANGE, "optimizer": _GREEN, "rounding_buffers": _RED, "activations": _PINK,
    "transients": _SKY, "logits": _YELLOW, "gathered": _GREY, "fragmentation": _BLACK,
    "later_weight_gradients": "#a6761d",
}  # fmt: skip
"""Colors of the categories of memory, from the bottom of a bar to the top."""
METHOD_COLORS: Final[dict[Method, str]] = {
    "memo": _BLUE, "full_recompute": _ORANGE, "selective_checkpointing": _PINK, "full_swap": _GREEN, "plain": _GREY
}  # fmt: skip
_MARKERS: Final = "osD^vP*X"
_LINES: Final = ("-", "--", ":", "-.")
_MAX_PANELS: Final = 9
_BAR_LIMIT: Final = 2.0
"""Height at which bars are cut, in multiples of the usable memory, to keep the other bars readable."""
_MAX_TICKS: Final = 9
_MIN_TICK_RATIO: Final = 1.35
"""Least ratio of two ticks of a logarithmic axis whose labels do not overlap."""
_GIB: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """Settings and estimate of one job."""

    overrides: Sequence[str]
    """Overrides of the command line, as ``name=value``."""

    longest: bool
    """Whether the job searched for the longest sequence."""

    answer: dict[str, Any] | None = None
    """The estimate as from `Estimate.to_dict`, or None after an error."""

    device_budget_bytes: int | None = None
    """Usable device memory."""

    message: str = ""
    """The error in one line, if there was one."""

    def save(self, folder: Path) -> None:
        """Writes the estimate into the folder of the job."""
        with replacing(folder / ESTIMATE_FILE) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> JobEstimate:
        """Reads what `save` wrote.

        Raises:
            OSError: The folder contains no estimate.
        """
        return cls(**json.loads((folder / ESTIMATE_FILE).read_text(encoding="utf-8")))

    def label(self, names: Sequence[str]) -> str:
        """Returns the values of settings as text for a legend."""
        values = zip(names, setting_values(self, names), strict=True)
        return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in values)


def load_estimates(folder: Path) -> list[JobEstimate]:
    """Returns the estimates of all jobs in a sweep's folder, in the order of the jobs' numbers."""
    jobs = sorted((path.parent for path in folder.glob(f"*/{ESTIMATE_FILE}")), key=lambda job: int(job.name))
    return [JobEstimate.load(job) for job in jobs]


def write_csv(jobs: Sequence[JobEstimate], path: Path) -> None:
    """Writes a CSV file with one row for each job: its overrides, its estimate and its error.

    Args:
        jobs: Jobs of the sweep.
        path: CSV file to write. Its folder is created if it does not exist.

    Raises:
        OSError: The file cannot be written.
    """
    rows = [{"overrides": " ".join(job.overrides), **_flat(job.answer or {}), "message": job.message} for job in jobs]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "message"]
    # Columns of one group are adjacent with the total last, although methods have different categories of memory.
    groups = list(dict.fromkeys(name.partition(".")[0] for name in names))
    columns = sorted(names, key=lambda name: (groups.index(name.partition(".")[0]), name.endswith(".total")))
    with replacing(path) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, "message"], restval="")
        writer.writeheader()
        writer.writerows(rows)


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    """Flattens nested values to names such as `parallel.tp`, and joins sentences."""
    flat: dict[str, Any] = {}
    for name, value in answer.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": item for key, item in _flat(value).items()})
        else:
            flat[name] = " ".join(value) if isinstance(value, list) else value
    return flat


class EstimateSweep(Callback):
    """Prints a table of all jobs at the end of a sweep, and writes a CSV file and pictures into its folder.

    The table goes to stderr if the jobs print JSON.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Shows the results of all jobs in the sweep's folder."""
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


Series = dict[str, list[JobEstimate]]
"""Jobs by the label of their other settings, in the order of the x axis."""


def draw_estimates(jobs: Sequence[JobEstimate], folder: Path) -> list[Path]:
    """Draws the pictures of a sweep that has at least two sequence lengths, or two numbers of GPUs.

    Args:
        jobs: Jobs of the sweep.
        folder: Folder for the PNG files.

    Returns:
        The files that were written.

    Raises:
        OSError: A file cannot be written.
    """
    names = differing_settings(jobs)
    lengths = _series([job for job in jobs if not job.longest], names, "seq_len")
    most = _series([job for job in jobs if job.longest], names, "gpus")
    files = []
    if lengths:
        files += [draw_bytes(lengths, folder / BYTES_FILE), draw_mfu(lengths, folder / MFU_FILE)]
    if most:
        files.append(draw_longest(most, folder / LONGEST_FILE))
    return files


def draw_bytes(series: Series, path: Path) -> Path:
    """Draws device memory by category and sequence length, one panel for each of the first nine series."""
    shown = dict(list(series.items())[:_MAX_PANELS])
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure = _figure(max(4.2 * columns, 6.5), 3.4 * rows + 0.9)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    top = _top(shown)
    for place, axes in enumerate(panels):
        if place >= len(shown):
            axes.set_axis_off()
            continue
        label, jobs = list(shown.items())[place]
        _draw_stacks(axes, jobs, _categories(shown), top)
        axes.set_title(literal(label), fontsize="medium")
        axes.set_xlabel("sequence length (tokens)" if place + columns >= len(shown) else "")
        axes.set_ylabel("" if place % columns else "GiB")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    more = f"; {len(series) - len(shown)} more in the table" if len(series) > len(shown) else ""
    figure.suptitle(f"Memory of the fullest device (x: does not fit, with the GiB needed{more})")
    figure.legend(handles, labels, loc="outside lower center", ncols=5 if columns > 1 else 3, frameon=False)
    return _save(figure, path)


def draw_mfu(series: Series, path: Path) -> Path:
    """Draws MFU by sequence length, one line for each series. Lengths that do not fit leave gaps."""
    figure, axes = _lines(series, lambda job: _answer(job)["mfu"], "seq_len", _tokens)
    axes.set_title("MFU (causal attention, recomputation not counted); gaps: does not fit")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("MFU (%)")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    return _save(figure, path)


def draw_longest(series: Series, path: Path) -> Path:
    """Draws the longest sequence by number of GPUs, one line for each series."""
    figure, axes = _lines(series, _longest, "gpus", str)
    lengths = [tokens for jobs in series.values() for job in jobs if (tokens := _longest(job))]
    if lengths:
        low, high = math.floor(math.log2(min(lengths))), math.ceil(math.log2(max(lengths)))
        axes.set_yscale("log", base=2)
        _set_ticks(axes.yaxis, [2**power for power in range(low, max(high, low + 1) + 1)], _tokens)
        axes.set_ylim(2**low, 2 ** max(high, low + 1))
    axes.set_title("Longest sequence that fits")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens (K = 1024, M = 1024 K)")
    return _save(figure, path)


def _answer(job: JobEstimate) -> dict[str, Any]:
    assert job.answer is not None
    return job.answer


def _longest(job: JobEstimate) -> float | None:
    return _answer(job)["seq_len"] if _answer(job)["status"] == "ok" else None


def _series(jobs: Sequence[JobEstimate], names: Sequence[str], over: str) -> Series:
    """Groups jobs without errors by all differing settings but one; empty if that setting has one value only."""
    others = [name for name in names if name != over]
    answered = sorted((job for job in jobs if job.answer is not None), key=lambda job: int(_answer(job)[over]))
    if len({_answer(job)[over] for job in answered}) < 2:
        return {}
    series: Series = {}
    for job in sorted(answered, key=jobs.index):
        series.setdefault(job.label(others), [])
    for job in answered:
        series[job.label(others)].append(job)
    return series


def _categories(series: Series) -> list[str]:
    """Categories of memory that are not zero everywhere."""
    sizes = [_answer(job)["device_bytes"] for jobs in series.values() for job in jobs]
    return [category for category in CATEGORY_COLORS if any(size.get(category) for size in sizes)]


def _top(series: Series) -> float:
    """Height in GiB at which bars are cut."""
    jobs = [job for jobs in series.values() for job in jobs]
    most: int = max(_answer(job)["device_bytes"]["total"] for job in jobs)
    rooms = [job.device_budget_bytes for job in jobs if job.device_budget_bytes is not None]
    return min(most, _BAR_LIMIT * max(rooms, default=most)) / _GIB


def _draw_stacks(axes: Any, jobs: Sequence[JobEstimate], categories: Sequence[str], top: float) -> None:
    need = [0.0] * len(jobs)
    for category in categories:
        bottom = [min(low, top) for low in need]
        need = [low + _answer(job)["device_bytes"].get(category, 0) / _GIB for low, job in zip(need, jobs, strict=True)]
        heights = [min(high, top) - low for low, high in zip(bottom, need, strict=True)]
        label, color = category.replace("_", " "), CATEGORY_COLORS[category]
        axes.bar(range(len(jobs)), heights, bottom=bottom, color=color, width=0.8, label=label)
    for place, job in enumerate(jobs):
        if _answer(job)["status"] != "ok":
            lacking = "host" if _answer(job)["status"] == "oohm" else f"{need[place]:,.0f}"
            axes.annotate(f"x {lacking}", (place, min(need[place], top)), ha="center", va="bottom", fontsize="small")
    room = [job.device_budget_bytes / _GIB for job in jobs if job.device_budget_bytes is not None]
    if room:
        axes.axhline(min(room), color="black", linestyle="--", linewidth=1, label="usable memory")
    axes.set_ylim(0, 1.1 * top)
    lengths = [_tokens(_answer(job)["seq_len"]) for job in jobs]
    axes.set_xticks(range(len(jobs)), lengths, rotation=90 if len(jobs) > _MAX_TICKS - 2 else 0)
    axes.grid(visible=True, axis="y", alpha=0.3)


def _lines(
    series: Series, value: Callable[[JobEstimate], float | None], over: str, text: Callable[[int], str]
) -> tuple[Figure, Any]:
    """Draws labeled lines over a setting on a logarithmic axis."""
    places = sorted({_answer(job)[over] for jobs in series.values() for job in jobs})
    figure = _figure(9, 5)
    axes = figure.add_subplot()
    for (label, jobs), style in zip(series.items(), _styles(series), strict=True):
        values = {_answer(job)[over]: value(job) for job in jobs}
        heights = [float("nan") if values.get(place) is None else values[place] for place in places]
        nowhere = all(height is None for height in values.values())
        legend = ", ".join([*([label] if label else []), *(["does not fit"] if nowhere else [])])
        axes.plot(places, heights, label=literal(legend) or None, **style)  # type: ignore[arg-type]
    axes.set_xscale("log", base=2)
    _set_ticks(axes.xaxis, ticks_of(places), text)
    axes.set_xlim(places[0] / 1.15, places[-1] * 1.15)
    axes.grid(visible=True, alpha=0.3)
    if any(series):
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure, axes


def _styles(series: Series) -> list[dict[str, Any]]:
    """Styles of lines. With several methods, the color shows the method and dashes distinguish its lines."""
    methods: list[Method] = [_answer(jobs[0])["method"] for jobs in series.values()]
    if len(set(methods)) == 1:
        return [
            {"color": _COLORS[number % len(_COLORS)], "marker": _MARKERS[number % len(_MARKERS)]}
            for number in range(len(series))
        ]
    order = list(METHOD_COLORS)
    return [
        {
            "color": METHOD_COLORS[method],
            "marker": _MARKERS[order.index(method)],
            "linestyle": _LINES[methods[:number].count(method) % len(_LINES)],
        }
        for number, method in enumerate(methods)
    ]


def ticks_of(values: Sequence[int]) -> list[int]:
    """Returns ticks at the values if their labels fit, otherwise at powers of two, or at both ends."""
    if len(values) <= _MAX_TICKS and all(b / a >= _MIN_TICK_RATIO for a, b in itertools.pairwise(values)):
        return list(values)
    powers = range(math.ceil(math.log2(values[0])), math.floor(math.log2(values[-1])) + 1)
    return [2**power for power in powers] if len(powers) > 1 else sorted({values[0], values[-1]})


def _set_ticks(axis: Any, ticks: Sequence[int], text: Callable[[int], str]) -> None:
    axis.set_ticks(ticks, [text(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def _tokens(count: int) -> str:
    for power, unit in ((2**20, "M"), (2**10, "K")):
        if count % power == 0:
            return f"{count // power}{unit}"
    return f"{count:,}"


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # the import takes a second, and only sweeps need it

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> Path:
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)
    return path
