"""Pieces of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text, and the others numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, template: str) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else template.format(value)


def ratio(value: float | None, base: float | None, template: str = "{:.3f}") -> str:
    """How many times the base a value is."""
    return "-" if value is None or not base else template.format(value / base)


def tokens(count: int) -> str:
    """A length, in K where it is some."""
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count:,}"


def source(report: dict[str, Any]) -> str:
    """What a report was measured by, on what, and when."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"`{report['command']}`, {report['date'][:10]}; {versions}; {report['cpu']['name']}"
