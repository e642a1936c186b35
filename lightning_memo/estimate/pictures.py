"""Pictures of a sweep of estimates: bytes by kind and MFU over the length, the longest length over the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from lightning_memo.estimate.swept import SweptEstimate, swept_settings
from lightning_memo.files import replacing

BYTES_NAME, MFU_NAME, LONGEST_NAME = "device_bytes.png", "mfu.png", "longest.png"

_COLORS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#7f7f7f", "#000000")
"""Those of Okabe and Ito, which people with colour-blindness can tell apart."""

_MARKERS: Final = "osD^vP*X"
_MOST_PANELS: Final = 6
_GIB: Final = 2**30

Series = dict[str, list[SweptEstimate]]
"""Jobs by what else was swept, in the order of what the picture is over."""


def draw_sweep(jobs: Sequence[SweptEstimate], folder: Path) -> list[Path]:
    """Draws what a sweep can show: lengths need two lengths, and longest ones need two numbers of GPUs.

    Args:
        jobs: of the sweep.
        folder: where the PNGs go.

    Returns:
        The files.

    Raises:
        OSError: one can't be written.
    """
    names = swept_settings(jobs)
    lengths = _series([job for job in jobs if not job.longest], names, "seq_len")
    most = _series([job for job in jobs if job.longest], names, "gpus")
    files = []
    if lengths:
        files += [draw_bytes(lengths, folder / BYTES_NAME), draw_mfu(lengths, folder / MFU_NAME)]
    if most:
        files.append(draw_longest(most, folder / LONGEST_NAME))
    return files


def draw_bytes(series: Series, path: Path) -> Path:
    """Draws device bytes by kind over the length, one panel for each series, the first six."""
    shown = dict(list(series.items())[:_MOST_PANELS])
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(max(4.2 * columns, 6.5), 3.4 * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    kinds = _kinds(shown)
    for place, axes in enumerate(panels):
        if place >= len(shown):
            axes.set_axis_off()
            continue
        label, jobs = list(shown.items())[place]
        _draw_stacks(axes, jobs, kinds)
        axes.set_title(label, fontsize="medium")
        axes.set_xlabel("tokens of a sequence" if place + columns >= len(shown) else "")
        axes.set_ylabel("" if place % columns else "GiB")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.suptitle("Memory of the fullest device (x: does not fit)")
    figure.legend(handles, labels, loc="outside lower center", ncols=5 if columns > 1 else 3, frameon=False)
    return _save(figure, path)


def draw_mfu(series: Series, path: Path) -> Path:
    """Draws MFU over the length, one line for each series; what does not fit leaves a gap."""
    figure, axes = _lines(series, lambda job: _answer(job)["mfu"], "seq_len", _tokens)
    axes.set_title("MFU (attention causal, nothing recomputed counted); gaps do not fit")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("MFU (%)")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    return _save(figure, path)


def draw_longest(series: Series, path: Path) -> Path:
    """Draws the longest length over the number of GPUs, one line for each series."""
    figure, axes = _lines(series, _longest, "gpus", str)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda tokens, _: _tokens(round(tokens)))
    axes.set_title("Longest sequence that fits")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens (K, M: 1024, 1024 x 1024)")
    return _save(figure, path)


def _answer(job: SweptEstimate) -> dict[str, Any]:
    assert job.answer is not None
    return job.answer


def _longest(job: SweptEstimate) -> float | None:
    return _answer(job)["seq_len"] if _answer(job)["status"] == "ok" else None


def _series(jobs: Sequence[SweptEstimate], names: Sequence[str], over: str) -> Series:
    """Jobs without mistakes by all that was swept but one thing; none where that has one value only."""
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


def _kinds(series: Series) -> list[str]:
    """Kinds that have bytes somewhere, in their order."""
    sizes = [_answer(job)["device_bytes"] for jobs in series.values() for job in jobs]
    kinds = dict.fromkeys(kind for size in sizes for kind in size)
    return [kind for kind in kinds if kind != "total" and any(size.get(kind) for size in sizes)]


def _draw_stacks(axes: Any, jobs: Sequence[SweptEstimate], kinds: Sequence[str]) -> None:
    bottom = [0.0] * len(jobs)
    for kind, color in zip(kinds, _COLORS * 2, strict=False):
        sizes = [_answer(job)["device_bytes"].get(kind, 0) / _GIB for job in jobs]
        axes.bar(range(len(jobs)), sizes, bottom=bottom, color=color, width=0.8, label=kind.replace("_", " "))
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    for place, job in enumerate(jobs):
        if _answer(job)["status"] != "ok":
            axes.annotate("x", (place, bottom[place]), ha="center", va="bottom", fontweight="bold")
    room = [job.device_room_bytes / _GIB for job in jobs if job.device_room_bytes is not None]
    if room:
        axes.axhline(min(room), color="black", linestyle="--", linewidth=1, label="usable memory")
    axes.set_xticks(range(len(jobs)), [_tokens(_answer(job)["seq_len"]) for job in jobs])
    axes.grid(visible=True, axis="y", alpha=0.3)


def _lines(
    series: Series, value: Callable[[SweptEstimate], float | None], over: str, text: Callable[[int], str]
) -> tuple[Figure, Any]:
    """A figure of lines over all values of a setting, evenly spaced, each with its label."""
    places = sorted({_answer(job)[over] for jobs in series.values() for job in jobs})
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, (label, jobs) in enumerate(series.items()):
        values = {_answer(job)[over]: value(job) for job in jobs}
        heights = [float("nan") if values.get(place) is None else values[place] for place in places]
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        axes.plot(range(len(places)), heights, color=color, marker=marker, label=label or None)  # type: ignore[arg-type]
    axes.set_xticks(range(len(places)), [text(place) for place in places])
    axes.set_xlim(-0.3, len(places) - 0.7)
    axes.grid(visible=True, alpha=0.3)
    if any(series):
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure, axes


def _tokens(count: int) -> str:
    for power, unit in ((2**20, "M"), (2**10, "K")):
        if count % power == 0:
            return f"{count // power}{unit}"
    return f"{count:,}"


def _save(figure: Figure, path: Path) -> Path:
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)
    return path
