"""Suggests slices of tokens for a sequence that does not fit with swapping alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from lightning_memo.estimate.memory.slice_settings import Slices
from lightning_memo.estimate.parallelism_search import search
from lightning_memo.estimate.request.candidate_parallelisms import Sizes
from lightning_memo.estimate.request.estimate_request import Estimate, Question

_MIN_SLICE_TOKENS: Final = 4096
"""Shortest slice that is suggested. Shorter slices underuse a GPU, which the cost model does not include."""

_SAME_TIME: Final = 1.01
"""Ratio of times up to which settings count as equally fast; of these, the simplest is suggested."""

_SLICE_MODES: Final = (
    Slices(tokens=1, host_backed="attention"),
    Slices(tokens=1, host_backed="all"),
    Slices(tokens=1, host_backed="all", schedule="slice"),
)
"""Ways to run slices, the simplest first. Each keeps more on the host than the one before."""


def suggest_slices(question: Question, forced: Sizes) -> Estimate | None:
    """Returns the fastest estimate with slices that fits, or None if slices do not help or are not estimated.

    For each way to run slices, the largest slice that fits is tried, a power of two of at least 4096 tokens.

    Args:
        question: Question without slices.
        forced: Sizes of the parallelism that are given, see `search`.
    """
    fitting = [answer for mode in _SLICE_MODES if (answer := _largest(question, forced, mode)) is not None]
    seconds = [answer.step_seconds for answer in fitting if answer.step_seconds is not None]
    return next((a for a in fitting if a.step_seconds and a.step_seconds <= _SAME_TIME * min(seconds)), None)


def _largest(question: Question, forced: Sizes, mode: Slices) -> Estimate | None:
    """The estimate with the largest slices that fit. Larger slices need more memory, so that few have to be tried."""
    lengths = list(_lengths(question.seq_len))
    best, low, high = None, 0, len(lengths)
    middle = 0  # if the shortest slices do not fit, none do
    while low < high:
        try:
            answer = search(replace(question, slices=replace(mode, tokens=lengths[middle])), forced).best
        except ValueError:  # slices are not estimated for this question
            return None
        if answer.status == "ok":
            best, low = answer, middle + 1
        elif middle == 0:
            return None
        else:
            high = middle
        middle = (low + high) // 2
    return best


def _lengths(seq_len: int) -> Iterator[int]:
    """Lengths of slices shorter than the sequence, in ascending order."""
    tokens = _MIN_SLICE_TOKENS
    while tokens < seq_len:
        yield tokens
        tokens *= 2
