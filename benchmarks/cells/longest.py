"""The longest sequence that a method trains, by trying: each length that is tried is a cell like the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cells.cell import UNFINISHED, Cell, Result, load
from lightning_memo.trials.length_search import Attempt, LengthSearch


def next_length(folder: Path, cell: Cell, low: int, high: int, multiple_of: int) -> int | None:
    """The length to try next, by the results that are there; `None` when it is known what fits.

    Args:
        folder: Of the device.
        cell: What is trained; its length is of no consequence.
        low: The least length of interest.
        high: The longest.
        multiple_of: What lengths are multiples of.

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
    """What a result says of a length. One that took too long ends the search like one that does not fit."""
    memory = result.get("memory") or {}
    return Attempt(
        tokens=tokens,
        fits=result["status"] == "ok",
        reason=result["reason"],
        planned_device_bytes=memory.get("peak_allocated_bytes"),
        device_limit_bytes=memory.get("total_bytes"),
    )
