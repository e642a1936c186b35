"""Searches for the fastest parallelism that fits, and for the longest sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.candidate_parallelisms import Sizes, candidate_parallelisms, left_out_sentence
from lightning_memo.estimate.request.estimate_request import Estimate, Question
from lightning_memo.estimate.step.step_estimate import estimate
from lightning_memo.estimate.why_slower import why_slower
from lightning_memo.utils.units import MOST_TOKENS

_SAME_TIME: Final = 1.001
"""Ratio of times up to which ZeRO stages count as equally fast; of these, the one with the least memory is used."""

Report = Callable[[int, int], None]
"""Called with the number of parallelisms tried so far and their total number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A parallelism that was not chosen, with its best ZeRO stage."""

    estimate: Estimate
    reason: str
    """Why it is worse than the best parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Parallelisms of a question, from best to worst.

    Those that fit are sorted by time, those that do not fit by the memory that they need. If nothing fits, the best one
    is the one that needs the least memory.
    """

    best: Estimate
    alternatives: tuple[Alternative, ...]


def search(question: Question, forced: Sizes | None = None, report: Report | None = None) -> Ranking:
    """Estimate all parallelisms of a question, and rank them.

    Args:
        question: Training to estimate.
        forced: Sizes that are given, by their names in `Parallelism`.
        report: Function for the progress, see `Report`.

    Raises:
        ValueError: No parallelism divides the model, the sequences and the batch.
    """
    divided: dict[tuple[int, ...], list[Estimate]] = {}
    choices = candidate_parallelisms(question, forced or {})
    for done, parallel in enumerate(choices):
        if report is not None:
            report(done, len(choices))
        sizes = (parallel.tp, parallel.cp, parallel.dp, parallel.pp, parallel.expert_parallel_size)
        divided.setdefault(sizes, []).append(estimate(question, parallel))
    best, *others = sorted(map(_best_stage, divided.values()), key=_rank)
    if missing := left_out_sentence(question, forced or {}):
        best = replace(best, limits=[*best.limits, missing])
    return Ranking(
        best=best,
        alternatives=tuple(Alternative(estimate=other, reason=why_slower(question, other, best)) for other in others),
    )


def longest(
    question: Question, forced: Sizes | None = None, multiple_of: int = 1024, report: Report | None = None
) -> int | None:
    """Return the number of tokens of the longest sequence that fits with any parallelism, or None if none fits.

    Longer sequences need more memory. Each parallelism is first tried at a length above the longest one so far; only if
    that fits, its own longest length is found by bisection.

    Args:
        question: Training to estimate. Its sequence length is ignored.
        forced: Sizes that are given, by their names in `Parallelism`.
        multiple_of: Number of tokens that lengths are multiples of.
        report: Function for the progress, see `Report`.

    Raises:
        ValueError: No parallelism divides the model and the batch.
    """
    # All sizes divide this length, so that it excludes no parallelism.
    divisible = replace(question, seq_len=multiple_of * question.gpus)
    choices = candidate_parallelisms(divisible, forced or {})
    tokens = None
    for done, parallel in enumerate(choices):
        if report is not None:
            report(done, len(choices))
        tokens = longest_with(question, parallel, multiple_of, above=tokens or 0) or tokens
    return tokens


def longest_with(question: Question, parallel: Parallelism, multiple_of: int, above: int = 0) -> int | None:
    """Return the number of tokens of the longest sequence that fits with a parallelism, or None if none fits.

    Args:
        question: Training to estimate. Its sequence length is ignored.
        parallel: Sizes of the parallelism.
        multiple_of: Number of tokens that lengths are multiples of.
        above: Only longer sequences are tried.
    """
    step = math.lcm(multiple_of, parallel.tp * parallel.cp)

    def fits(steps: int) -> bool:
        tokens = steps * step
        return tokens <= MOST_TOKENS and estimate(replace(question, seq_len=tokens), parallel).status == "ok"

    low = above // step + 1
    if not fits(low):
        return None
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def _best_stage(stages: list[Estimate]) -> Estimate:
    """Of the fastest stages that fit, the one with the least memory; if none fits, the one that needs the least."""
    seconds = [stage.step_seconds for stage in stages if stage.step_seconds is not None]
    if not seconds:
        return min(stages, key=_rank)
    fast = [s for s in stages if s.step_seconds is not None and s.step_seconds <= _SAME_TIME * min(seconds)]
    return min(fast, key=lambda stage: stage.device_bytes["total"])


def _rank(answer: Estimate) -> tuple[float, ...]:
    """Sort key: those that fit by time, then those out of device memory and those out of host memory by their need."""
    device = answer.device_bytes["total"]
    if answer.step_seconds is not None:
        return 0, answer.step_seconds
    return (1, device) if answer.status == "oom" else (2, answer.host_bytes, device)
