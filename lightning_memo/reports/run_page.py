"""The report of a run: one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Final

from rich.table import Table

from lightning_memo.utils.files import replacing
from lightning_memo.utils.tables import html_of

NAME: Final = "report.html"
_TEMPLATE: Final = Path(__file__).with_name("run_page.html")
_LONGEST_VALUE: Final = 40
"""Characters of a value beside others."""
_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Colors that color-blind people can distinguish."""
Points = Sequence[tuple[int, float]]
"""Optimizer steps and the values that were logged there."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Content of the page."""

    title: str
    facts: Mapping[str, str]
    """Values by name, in order."""

    tables: Sequence[Table] = ()
    curves: Mapping[str, Mapping[str, Points]] = field(default_factory=dict)
    """Lines by name, for each chart by title."""

    pictures: Mapping[str, Path | str] = field(default_factory=dict)
    """PNG files by title, or the reason why there is none."""

    links: Mapping[str, str] = field(default_factory=dict)
    """Files in the same folder by their description."""

    def save(self, path: Path) -> None:
        """Write the page.

        Args:
            path: The file.

        Raises:
            OSError: A picture cannot be read, or the page cannot be written.
        """
        page = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
            title=html.escape(self.title),
            facts="\n".join(_fact(name, value) for name, value in self.facts.items()),
            sections="\n".join([*self._tables(), *self._curves(), *self._pictures(), *self._links()]),
        )
        with replacing(path) as unfinished:
            unfinished.write_text(page, encoding="utf-8")

    def _tables(self) -> list[str]:
        return [f'<div class="table" tabindex="0">{html_of(table)}</div>' for table in self.tables]

    def _curves(self) -> list[str]:
        drawn = [(title, curve_svg(title, lines)) for title, lines in self.curves.items() if any(lines.values())]
        figures = [_image(title, svg.encode(), "image/svg+xml") for title, svg in drawn]
        return [f'<div class="curves">{"".join(figures)}</div>'] if figures else []

    def _pictures(self) -> list[str]:
        return [_figure(title, content) for title, content in self.pictures.items()]

    def _links(self) -> list[str]:
        items = [f'<li><a href="{html.escape(to)}">{html.escape(what)}</a></li>' for what, to in self.links.items()]
        return [f"<h2>Related pages</h2><ul>{''.join(items)}</ul>"] if items else []


def curve_svg(title: str, lines: Mapping[str, Points]) -> str:
    """Draw lines over optimizer steps as SVG.

    Args:
        title: Quantity and unit.
        lines: Points by name of the line. NaN leaves a gap.
    """
    from matplotlib.figure import Figure  # the import takes a second

    figure = Figure(figsize=(5.2, 3), layout="constrained")
    axes = figure.add_subplot()
    for (name, points), color in zip(lines.items(), _COLORS, strict=False):
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(
            steps, values, color=color, label=literal(name), marker="o" if len(points) < 12 else None, markersize=3
        )
    axes.set_title(literal(title), fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True, alpha=0.3)
    if len(lines) > 1:
        axes.legend(frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _fact(name: str, value: str) -> str:
    wide = ' class="sentence"' if len(value) > _LONGEST_VALUE else ""
    return f"<div{wide}><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"


def _figure(title: str, content: Path | str) -> str:
    if isinstance(content, str):
        return f"<p>{html.escape(title)}: {html.escape(content)}.</p>"
    image = _image(title, content.read_bytes(), "image/png")
    caption = f"<figcaption>{html.escape(title)}</figcaption>"
    return f'<figure><div class="wide" tabindex="0">{image}</div>{caption}</figure>'


def _image(title: str, content: bytes, kind: str) -> str:
    data = base64.b64encode(content).decode()
    return f'<img src="data:{kind};base64,{data}" alt="{html.escape(title)}">'


def literal(text: str) -> str:
    """Return text for matplotlib in which dollar signs stand for themselves and begin no formula."""
    return text.replace("$", r"\$")
