"""The part of the performance page with gradients at full size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages.markdown import source, table, tokens

INTRODUCTION = """## Gradients in bf16

Relative distances of all gradients of a step, and of those of the weight that is farthest. On a GPU, kernels sum some gradients
in a varying order, and plain training does not repeat its own gradients ("plain, again"): gradients of stored and recomputed
layers of all tokens are as near to plain training as plain training is to itself. Slices round at other places; on the CPU, they are
nearly as close to full precision as plain training is."""  # noqa: E501  lines of the page


def sections(results: Path) -> list[str]:
    """Returns a section for each device with a report.

    Raises:
        ValueError: A report cannot be read.
    """
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("gradients-*.json"))]
    return [_section(report) for report in reversed(reports)]


def _section(report: dict[str, Any]) -> str:
    settings = report["settings"]
    columns = {"to_plain": "plain training", "to_full": "full precision"}
    known = [to for to in columns if all(to in row for row in report["rows"])]
    head = ["", *(text for to in known for text in (f"distance to {columns[to]}", "of the farthest weight"))]
    rows = [
        [row["run"], *(f"{row[to][which]:.1e}" for to in known for which in ("all", "farthest"))]
        for row in report["rows"]
    ]
    precision = "bf16" if settings["bf16"] else "fp32"
    what = f"{settings['model']}, {settings['layers']} layers, {tokens(settings['tokens'])} tokens, {precision}"
    title = f"**Gradients beside those of plain training: {report['device']}**"
    return "\n\n".join([title, f"{what}; {source(report)}.", table(head, rows)])
