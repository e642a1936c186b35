"""The picture of speed by length."""

from __future__ import annotations

from pathlib import Path

from cells.methods import METHODS
from matplotlib.figure import Figure

from lightning_memo.utils.files import replacing
from pages.comparison import Group
from pages.markdown import tokens


def draw(group: Group, device: str, path: Path) -> None:
    """Draws tokens per second by length for each method with a time, and the bound as a dotted line.

    Args:
        group: The group to draw.
        device: Name of the device on which it was measured.
        path: The PNG file to write.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for method in group.methods:
        timed = [t for t in group.lengths if group.seconds(method, t)]
        style = "o-" if METHODS[method].is_memo else "s--"
        if timed:
            speeds = [t / float(group.seconds(method, t) or 1) for t in timed]
            axes.plot(timed, speeds, style, label=METHODS[method].label, linewidth=2 if method == "memo_auto" else 1)
    bounds = [(t, t / bound) for t in group.lengths if (bound := group.bound_seconds(t))]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), ":", color="black", label="bound")
    axes.set_xscale("log", base=2)
    axes.set_xticks(group.lengths, [tokens(t) for t in group.lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{group.cell.group}, {device}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=110)
