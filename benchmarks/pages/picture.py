"""The picture of the speed of methods."""

from __future__ import annotations

from pathlib import Path

from cells.methods import METHODS
from matplotlib.figure import Figure

from lightning_memo.utils.files import replacing
from pages.comparison import Group
from pages.markdown import tokens


def draw(group: Group, device: str, path: Path) -> None:
    """Draws bars of tokens per second, for each method that settled at each length, and the bound as a dotted line.

    Args:
        group: The group to draw.
        device: Name of the device on which it was measured.
        path: The PNG file to write.
    """
    found = {length: bars for length in group.lengths if (bars := _bars(group, length))}
    sizes = [len(bars) for bars in found.values()]
    figure = Figure(figsize=(9, 0.8 + sum(0.6 + 0.3 * size for size in sizes)), layout="constrained")
    grid = figure.subplots(len(found), squeeze=False, sharex=True, height_ratios=sizes)
    for axes, (length, bars) in zip(grid[:, 0], found.items(), strict=True):
        colors = ["tab:blue" if METHODS[method].is_memo else "tab:gray" for method, _ in bars]
        drawn = axes.barh([METHODS[method].label for method, _ in bars], [speed for _, speed in bars], color=colors)
        axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
        if bound := group.bound_seconds(length):
            axes.axvline(length / bound, linestyle=":", color="black", label="bound")
            axes.legend(fontsize=8)
        axes.set_title(f"{tokens(length)} tokens", fontsize=10)
        axes.margins(x=0.12)
    grid[-1, 0].set_xlabel("tokens per second")
    figure.suptitle(f"{group.cell.group}, {device}: {group.code}", fontsize=11)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=110)


def _bars(group: Group, length: int) -> list[tuple[str, float]]:
    """Returns the tokens per second of each method that settled at a length, slowest first."""
    timed = [(method, seconds) for method in group.methods if (seconds := group.seconds(method, length))]
    return sorted(((method, length / seconds) for method, seconds in timed), key=lambda bar: bar[1])
