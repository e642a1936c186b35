"""Slices of tokens that make a sequence fit where swapping alone does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from lightning_memo.config import format_bytes, format_seconds
from lightning_memo.estimate.memory.slice_settings import Slices
from lightning_memo.estimate.parallelism_search import search
from lightning_memo.estimate.request.question import Estimate, Question

_LEAST_TOKENS: Final = 4096
"""Of a slice; shorter ones leave a GPU idle, which times here do not know."""

_SAME_TIME: Final = 1.01
"""Settings whose times differ by less count as equally fast, and the simplest is taken."""

_BACKED: Final = (
    Slices(tokens=1, host_backed="attention"),
    Slices(tokens=1, host_backed="all"),
    Slices(tokens=1, host_backed="all", schedule="slice"),
)
"""The simplest first; what is on the host grows."""


def suggest_slices(question: Question, forced: Mapping[str, int]) -> Estimate | None:
    """The fastest answer with slices that fits; None where slices don't help, or are not estimated.

    Of each way to run slices the largest power of two is taken that fits.

    Args:
        question: one without slices.
        forced: see `search`.
    """
    fitting = [answer for backed in _BACKED if (answer := _largest(question, forced, backed)) is not None]
    seconds = [answer.step_seconds for answer in fitting if answer.step_seconds is not None]
    return next((a for a in fitting if a.step_seconds and a.step_seconds <= _SAME_TIME * min(seconds)), None)


def suggestion_sentence(answer: Estimate) -> str:
    """What to set, and what comes of it."""
    assert answer.step_seconds is not None
    return (
        f"It fits with {answer.slices}: {format_seconds(answer.step_seconds)} a step, MFU {answer.mfu:.1f} %, "
        f"{format_bytes(answer.device_bytes['total'])} on the device, {format_bytes(answer.host_bytes)} on a node's "
        "host."
    )


def _largest(question: Question, forced: Mapping[str, int], backed: Slices) -> Estimate | None:
    for tokens in _lengths(question.seq_len):
        try:
            answer = search(replace(question, slices=replace(backed, tokens=tokens)), forced).best
        except ValueError:  # slices are not estimated for it
            return None
        if answer.status == "ok":
            return answer
    return None


def _lengths(seq_len: int) -> Iterator[int]:
    tokens = 1 << max(seq_len - 1, 1).bit_length() - 1
    while tokens >= _LEAST_TOKENS:
        yield tokens
        tokens //= 2
