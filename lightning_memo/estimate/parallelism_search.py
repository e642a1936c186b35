"""Which parallelism is the fastest that fits, why others lose, and how long a sequence may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.candidate_parallelisms import candidate_parallelisms, left_out_sentence
from lightning_memo.estimate.request.question import Estimate, Question
from lightning_memo.estimate.step.step_estimate import estimate
from lightning_memo.estimate.why_slower import why_slower
from lightning_memo.utils.units import MOST_TOKENS

_SAME_TIME: Final = 1.001
"""Stages of ZeRO whose times differ by less count as equally fast, and the one that takes least memory is taken."""

Report = Callable[[int, int], None]
"""Is told how many parallelisms were tried, of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A parallelism that was not chosen, with the best stage of ZeRO for it."""

    estimate: Estimate
    reason: str
    """Why it loses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The fastest that fits, and the others: those that fit by time, then those that don't by what they would need.

    Where nothing fits, the best is the one that needs least.
    """

    best: Estimate
    alternatives: tuple[Alternative, ...]


def search(question: Question, forced: Mapping[str, int] | None = None, report: Report | None = None) -> Ranking:
    """Estimate all parallelisms of a question, and rank them.

    Args:
        question: what is to be trained.
        forced: sizes that are given, by the names of `Parallelism`.
        report: see `Report`.

    Raises:
        ValueError: no parallelism divides the model, the sequences and the batch.
    """
    divided: dict[tuple[int, ...], list[Estimate]] = {}
    choices = candidate_parallelisms(question, forced or {})
    for done, parallel in enumerate(choices):
        if report is not None:
            report(done, len(choices))
        sizes = (parallel.tp, parallel.cp, parallel.dp, parallel.pp)
        divided.setdefault(sizes, []).append(estimate(question, parallel))
    best, *others = sorted(map(_best_stage, divided.values()), key=_rank)
    if missing := left_out_sentence(question, forced or {}):
        best = replace(best, limits=[*best.limits, missing])
    return Ranking(
        best=best,
        alternatives=tuple(Alternative(estimate=other, reason=why_slower(question, other, best)) for other in others),
    )


def longest(
    question: Question, forced: Mapping[str, int] | None = None, multiple_of: int = 1024, report: Report | None = None
) -> int | None:
    """Tokens of the longest sequence that fits with any parallelism; None where none does.

    Longer sequences need more, so that each parallelism is only asked whether it beats the longest length so far, and
    if it does, its own longest is found by bisection.

    Args:
        question: what is to be trained; its length is not looked at.
        forced: sizes that are given, by the names of `Parallelism`.
        multiple_of: what lengths are multiples of.
        report: see `Report`.

    Raises:
        ValueError: no parallelism divides the model and the batch.
    """
    # A length that all sizes divide; each parallelism then keeps to the lengths that it divides.
    divisible = replace(question, seq_len=multiple_of * question.gpus)
    choices = candidate_parallelisms(divisible, forced or {})
    tokens = None
    for done, parallel in enumerate(choices):
        if report is not None:
            report(done, len(choices))
        tokens = longest_with(question, parallel, multiple_of, above=tokens or 0) or tokens
    return tokens


def longest_with(question: Question, parallel: Parallelism, multiple_of: int, above: int = 0) -> int | None:
    """Tokens of the longest sequence that fits with a parallelism; None where no length above `above` does.

    Args:
        question: what is to be trained; its length is not looked at.
        parallel: how.
        multiple_of: what lengths are multiples of.
        above: lengths up to this one are of no interest.
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
    """The one with the least memory among the fastest that fit; where none fits, the one that needs least."""
    seconds = [stage.step_seconds for stage in stages if stage.step_seconds is not None]
    if not seconds:
        return min(stages, key=_rank)
    fast = [s for s in stages if s.step_seconds is not None and s.step_seconds <= _SAME_TIME * min(seconds)]
    return min(fast, key=lambda stage: stage.device_bytes["total"])


def _rank(answer: Estimate) -> tuple[float, ...]:
    """The fastest first; then what lacks device memory, then what lacks host memory, the least need first."""
    device = answer.device_bytes["total"]
    if answer.step_seconds is not None:
        return 0, answer.step_seconds
    return (1, device) if answer.status == "oom" else (2, answer.host_bytes, device)
