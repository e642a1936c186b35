"""Writes rich's tables as text and as HTML."""

from __future__ import annotations

import html
import io
from typing import Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_COLUMNS: Final = 80


def text_of(*tables: Table) -> str:
    """Write tables as text of 80 columns."""
    console = Console(width=_COLUMNS, file=io.StringIO(), color_system=None, force_terminal=False)
    console.print(*tables, sep="\n")
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def html_of(table: Table) -> str:
    """Write a table as HTML."""
    title, caption = (table.title and f"<caption>{_escaped(table.title)}</caption>"), table.caption
    head = "".join(f"<th>{_escaped(column.header)}</th>" for column in table.columns)
    cells = zip(*(column.cells for column in table.columns), strict=True)
    rows = [
        "".join(
            f'<td style="text-align: {column.justify}; white-space: pre-wrap">{_escaped(cell)}</td>'
            for column, cell in zip(table.columns, row, strict=True)
        )
        for row in cells
    ]
    lines = [title or "", f"<thead><tr>{head}</tr></thead>" if table.show_header else ""]
    lines += [f"<tr>{row}</tr>" for row in rows]
    after = f"<p>{_escaped(caption)}</p>" if caption else ""
    return "\n".join(["<table>", *filter(None, lines), f"</table>{after}"])


def _escaped(content: RenderableType) -> str:
    text = content if isinstance(content, Text) else Text.from_markup(str(content))
    return html.escape(text.plain)
