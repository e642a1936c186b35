"""Lists the parallelisms that are possible, and suggests changes if there are none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Final, get_args

from lightning_memo.estimate.inputs.parallelism import BATCH, SEQUENCE, Obstacle, Parallelism, Schedule
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import runs_here, why_not_by_method

Sizes = Mapping[str, Any]
"""Sizes and the schedule of pipelines, if they are given, by their names in `Parallelism`."""

_DEFAULTS: Final = {"pp": 1, "virtual_pipeline_size": 1, "pipeline_schedule": "1f1b"}
"""What the command itself gives by default."""


_DEVICES = {"tp", "cp", "dp", "pp"}
"""Sizes whose product is the number of devices."""


def candidate_parallelisms(question: Question, forced: Sizes) -> list[Parallelism]:
    """Return all parallelisms that a question allows.

    Raises:
        ValueError: There are none. The message is one line with the reasons and the changes that would help.
    """
    allowed = list(_allowed(question, forced))
    if not allowed:
        raise ValueError(_wrong_product(question, forced) or _nothing_divides(question, forced))
    return allowed


def left_out_sentence(question: Question, forced: Sizes) -> str:
    """Describe the parallelisms that only the sequence length excludes; empty if there are none."""
    sizes = [parallel.tp * parallel.cp for parallel in _ruled_out_by(SEQUENCE, question, forced)]
    if not sizes:
        return ""
    lengths = _multiples_near(question.seq_len, math.lcm(*sizes))
    return (
        f"Not considered: parallelisms with TP x CP = {_listed(sizes)}, which does not divide "
        f"{question.seq_len:,} tokens. They are possible with {_listed(lengths, ',')} tokens."
    )


def nearest_counts(counts: Iterable[int], wanted: int) -> list[int]:
    """Return the nearest number below and the nearest one above, if they exist."""
    counts = list(counts)
    lower, higher = [n for n in counts if n < wanted], [n for n in counts if n > wanted]
    return [*([max(lower)] if lower else []), *([min(higher)] if higher else [])]


def _allowed(question: Question, forced: Sizes) -> Iterator[Parallelism]:
    return (parallel for parallel in _products(question, forced) if not any(_obstacles(question, parallel)))


def _obstacles(question: Question, parallel: Parallelism) -> tuple[Obstacle | str, ...]:
    divided = parallel.obstacles(question.shape, question.seq_len, question.batch_size)
    return *divided, why_not_by_method(question, parallel)


def _products(question: Question, forced: Sizes) -> Iterator[Parallelism]:
    """Parallelisms of all devices with the given sizes. With one rank, all ZeRO stages are equal."""
    gpus = question.gpus
    for tp in _divisors(gpus, forced.get("tp")):
        for cp in _divisors(gpus // tp, forced.get("cp")):
            for pp in _divisors(gpus // tp // cp, forced.get("pp")):
                dp = gpus // tp // cp // pp
                if dp == forced.get("dp", dp):
                    sharded = (0, 1, 2, 3) if dp * cp > 1 else (0,)
                    stages = [forced["zero_stage"]] if "zero_stage" in forced else sharded
                    for stage, groups in product(stages, _expert_sizes(question, dp * cp, forced)):
                        yield Parallelism(
                            tp=tp, cp=cp, dp=dp, pp=pp, zero_stage=stage, expert_parallel_size=groups,
                            virtual_pipeline_size=forced.get("virtual_pipeline_size", 1),
                            pipeline_schedule=forced.get("pipeline_schedule", "1f1b"),
                        )  # fmt: skip


def _expert_sizes(question: Question, ranks: int, forced: Sizes) -> list[int]:
    """Sizes of expert parallelism: the given one, or those that divide the ranks of a mixture."""
    if "expert_parallel_size" in forced:
        return [forced["expert_parallel_size"]]
    return _divisors(ranks) if question.shape.experts > 1 and runs_here(question) else [1]


def _divisors(number: int, forced: int | None = None) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0 and forced in (None, size)]


def _ruled_out_by(what: str, question: Question, forced: Sizes) -> Iterator[Parallelism]:
    """Parallelisms that are excluded by one obstacle only."""
    for parallel in _products(question, forced):
        obstacles = [obstacle for obstacle in _obstacles(question, parallel) if obstacle]
        if obstacles and all(isinstance(each, Obstacle) and each.of == what for each in obstacles):
            yield parallel


def _given(forced: Sizes) -> dict[str, Any]:
    """What the user gave."""
    return {name: size for name, size in forced.items() if name not in _DEFAULTS or size != _DEFAULTS[name]}


def _wrong_product(question: Question, forced: Sizes) -> str:
    """Message if the given sizes do not divide the number of GPUs; otherwise empty."""
    gpus, sizes = question.gpus, {name: size for name, size in _given(forced).items() if name in _DEVICES}
    count = math.prod(sizes.values())
    if gpus % count == 0 and (_DEVICES - forced.keys() or count == gpus):
        return ""
    given = " x ".join(f"parallel.{name}={size}" for name, size in sizes.items())
    given += f" = {count}" if len(sizes) > 1 else ""
    if gpus % count == 0:
        return f"{given} is not gpus={gpus}: give sizes whose product is {gpus}, or leave one out"
    if len(sizes) == 1:
        return f"{given} does not divide gpus={gpus}: give {_listed(_divisors(gpus))}, or leave it out"
    return f"{given} does not divide gpus={gpus}: give sizes whose product does, or leave one out"


def _nothing_divides(question: Question, forced: Sizes) -> str:
    smallest: dict[str, Obstacle] = {}
    others: dict[str, None] = {}
    for parallel in _products(question, forced):
        first = next(obstacle for obstacle in _obstacles(question, parallel) if obstacle)
        if isinstance(first, str):
            others[first] = None
        else:
            smallest[first.of] = min(first, smallest.get(first.of, first))
    why_not = "; ".join([*map(str, smallest.values()), *others])
    given = ", ".join([f"gpus={question.gpus}", *(f"parallel.{name}={size}" for name, size in _given(forced).items())])
    changes = ", or ".join(_remedies(question, forced))
    remedies = f"give {changes}" if changes else "give other sizes, or leave them out"
    return f"{given}: no such parallelism is possible ({why_not}): {remedies}"


def _remedies(question: Question, forced: Sizes) -> Iterator[str]:
    """Single changes that make a parallelism possible."""
    values = {"zero_stage": range(4), "pipeline_schedule": get_args(Schedule)}
    for name in _given(forced):
        possible = [
            size
            for size in values.get(name, _divisors(question.gpus))
            if any(_allowed(question, {**forced, name: size}))
        ]
        if possible:
            yield f"parallel.{name}={_listed(possible)}"
    divided = (n for n in question.cluster.device_counts if any(_allowed(replace(question, gpus=n), forced)))
    if counts := nearest_counts(divided, question.gpus):
        yield f"gpus={_listed(counts)}"
    if groups := [parallel.dp for parallel in _ruled_out_by(BATCH, question, forced)]:
        yield f"batch_size={_listed(_multiples_near(question.batch_size, min(groups)))}"
    if sizes := [parallel.tp * parallel.cp for parallel in _ruled_out_by(SEQUENCE, question, forced)]:
        yield f"seq_len={_listed(_multiples_near(question.seq_len, math.lcm(*sizes)))}"


def _multiples_near(number: int, step: int) -> list[int]:
    """The multiples of a step below and above a number that is not a multiple itself."""
    lower = number // step * step
    return [multiple for multiple in (lower, lower + step) if multiple]


def _listed(numbers: Iterable[int | str], separator: str = "") -> str:
    *others, last = (f"{number:{separator}}" for number in sorted(set(numbers)))
    return f"{', '.join(others)} or {last}" if others else last
