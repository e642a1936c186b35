"""The longest sequence that a method can train, found by trying. Each tried length is an ordinary cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cells.cell import UNFINISHED, Cell, Result, load
from lightning_memo.trials.longest_sequence import LengthSearch
from lightning_memo.trials.training_trial import Attempt


def next_length(folder: Path, cell: Cell, low: int, high: int, multiple_of: int) -> int | None:
    """Returns the length to try next, given the existing results, or `None` if the longest length is known.

    Args:
        folder: Folder of the device.
        cell: The cell; its length is not used.
        low: Shortest length.
        high: Longest length.
        multiple_of: Lengths are multiples of this number.

    Raises:
        ValueError: There is no such length.
    """
    search = LengthSearch(low, high, multiple_of)
    while (tokens := search.next_tokens()) is not None:
        result = load(folder, replace(cell, tokens=tokens))
        if result is None or result["status"] in UNFINISHED:
            break
        search.add(attempt_of(tokens, result))
    return tokens


def attempt_of(tokens: int, result: Result) -> Attempt:
    """Returns whether a result counts as fitting. A timeout ends the search like a length that does not fit."""
    memory = result.get("memory") or {}
    return Attempt(
        tokens=tokens,
        fits=result["status"] == "ok",
        reason=result["reason"],
        planned_device_bytes=memory.get("peak_allocated_bytes"),
        device_limit_bytes=memory.get("total_bytes"),
    )
