"""Functions that format Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cells.methods import METHODS


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose first column is text and whose other columns are numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, template: str) -> str:
    """Formats a number, or returns a dash for `None`."""
    return "-" if value is None else template.format(value)


def ratio(value: float | None, base: float | None, template: str = "{:.3f}") -> str:
    """Formats the ratio of a value to a base."""
    return "-" if value is None or not base else template.format(value / base)


def over(ratio: str, method: str) -> str:
    """Returns a cell with a ratio to a method and the name of that method, which may wrap (`site.css`)."""
    return f"{ratio} <small>{METHODS[method].label}</small>"


def tokens(count: int) -> str:
    """Formats a length, in K if it is a multiple of 1024."""
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count:,}"


def source(report: dict[str, Any]) -> str:
    """Returns the command, date, versions and processor of a report."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"`{report['command']}`, {report['date'][:10]}; {versions}; {report['cpu']['name']}"
