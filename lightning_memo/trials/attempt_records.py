"""The attempts of a search as a JSON file, from which the search can resume, and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_memo.trials.length_search import Attempt, LengthSearch
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import format_bytes


def save_search(path: Path, search: LengthSearch, settings: dict[str, Any]) -> None:
    """Writes the attempts of a search and the settings that they were made with.

    Raises:
        OSError: The file cannot be written.
    """
    longest = search.longest
    content = {
        "longest": None if longest is None else longest.tokens,
        "finished": search.next_tokens() is None,
        "low": search.low,
        "high": search.high,
        "multiple_of": search.multiple_of,
        "settings": settings,
        "attempts": [asdict(attempt) for attempt in search.attempts],
    }
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_attempts(path: Path, settings: dict[str, Any]) -> list[Attempt]:
    """Returns the attempts of an earlier search with the same settings, or none if the file does not exist.

    Raises:
        ValueError: The file was written with other settings, or not by `save_search`.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        attempts = [Attempt(**attempt) for attempt in content["attempts"]]
        earlier = content["settings"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: not a file of an earlier search ({error}): give another file, or resume=False"
        ) from None
    if differing := sorted(name for name in settings | earlier if settings.get(name) != earlier.get(name)):
        raise ValueError(
            f"{path}: the earlier search used another {', '.join(differing)}: start a new search with resume=False"
        )
    return attempts


def attempts_table(attempts: Sequence[Attempt]) -> Table:
    """Returns a table with one row for each length that was tried, the shortest first."""
    table = Table(title="Lengths", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for name in ("tokens", "planned", "device peak", "host", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for attempt in sorted(attempts, key=lambda attempt: attempt.tokens):
        sizes = (attempt.planned_device_bytes, attempt.peak_device_bytes, attempt.host_bytes)
        seconds = "-" if attempt.step_seconds is None else f"{attempt.step_seconds:.2f} s"
        cells = ["-" if size is None else format_bytes(size) for size in sizes]
        table.add_row(f"{attempt.tokens:,}", *cells, seconds, Text("fits" if attempt.fits else attempt.reason))
    return table
