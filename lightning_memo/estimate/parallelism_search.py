"""Searches for the fastest parallelism that fits and for the longest sequence, and explains why others are worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, get_args

from lightning_memo.estimate.planner_inputs import device_budget
from lightning_memo.estimate.request import (
    BATCH,
    SEQUENCE,
    Estimate,
    EstimateRequest,
    Obstacle,
    Parallelism,
    Schedule,
    why_not_parallel,
)
from lightning_memo.estimate.step_estimate import estimate
from lightning_memo.estimate.step_times import (
    data_parallel_seconds,
    idle_seconds,
    layer_times,
    message_seconds,
    optimizer_seconds,
    outside_seconds,
)
from lightning_memo.utils.units import MOST_TOKENS, about_seconds, format_bytes

_SAME_TIME: Final = 1.001
"""Ratio of times up to which ZeRO stages count as equally fast; of these, the one with the least memory is used."""

Report = Callable[[int, int], None]
"""Called with the number of parallelisms tried so far and their total number."""

Sizes = Mapping[str, Any]
"""Sizes and the schedule of pipelines, if they are given, by their names in `Parallelism`."""
_DEFAULTS: Final = {"pp": 1, "virtual_pipeline_size": 1, "pipeline_schedule": "1f1b"}
"""What the command itself gives by default."""
_DEVICES = {"tp", "cp", "dp", "pp"}
"""Sizes whose product is the number of devices."""
_TENSOR, _CONTEXT, _DATA = "tensor-parallel traffic", "context-parallel traffic", "data-parallel traffic"
_EXPERT, _STAGES = "expert-parallel traffic", "messages between pipeline stages"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A parallelism that was not chosen, with its best ZeRO stage."""

    estimate: Estimate
    reason: str
    """Why it is worse than the best parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Parallelisms of a training, from best to worst.

    Those that fit are sorted by time, those that do not fit by the memory that they need. If nothing fits, the best one
    is the one that needs the least memory.
    """

    best: Estimate
    alternatives: tuple[Alternative, ...]


def search(request: EstimateRequest, forced: Sizes | None = None, report: Report | None = None) -> Ranking:
    """Estimate all parallelisms of a training, and rank them.

    Args:
        request: Training to estimate.
        forced: Sizes that are given, by their names in `Parallelism`.
        report: Function for the progress, see `Report`.

    Raises:
        ValueError: No parallelism divides the model, the sequences and the batch.
    """
    divided: dict[tuple[int, ...], list[Estimate]] = {}
    choices = candidate_parallelisms(request, forced or {})
    for done, parallel in enumerate(choices):
        if report is not None:
            report(done, len(choices))
        sizes = (parallel.tp, parallel.cp, parallel.dp, parallel.pp, parallel.expert_parallel_size)
        divided.setdefault(sizes, []).append(estimate(request, parallel))
    best, *others = sorted(map(_best_stage, divided.values()), key=_rank)
    if missing := left_out_sentence(request, forced or {}):
        best = replace(best, limits=[*best.limits, missing])
    return Ranking(
        best=best,
        alternatives=tuple(Alternative(estimate=other, reason=why_slower(request, other, best)) for other in others),
    )


def longest(
    request: EstimateRequest,
    forced: Sizes | None = None,
    multiple_of: int = 1024,
    report: Report | None = None,
    above: int = 0,
) -> int | None:
    """Return the number of tokens of the longest sequence that fits with any parallelism, or None if none fits.

    Longer sequences need more memory. Each parallelism is first tried at a length above the longest one so far; only if
    that fits, its own longest length is found by bisection.

    Args:
        request: Training to estimate. Its sequence length is ignored.
        forced: Sizes that are given, by their names in `Parallelism`.
        multiple_of: Number of tokens that lengths are multiples of.
        report: Function for the progress, see `Report`.
        above: Only longer sequences are tried.

    Raises:
        ValueError: No parallelism divides the model and the batch.
    """
    # All sizes divide this length, so that it excludes no parallelism.
    divisible = replace(request, seq_len=multiple_of * request.gpus)
    choices = candidate_parallelisms(divisible, forced or {})
    tokens = None
    for done, parallel in enumerate(choices):
        if report is not None:
            report(done, len(choices))
        tokens = longest_with(request, parallel, multiple_of, above=tokens or above) or tokens
    return tokens


def longest_with(request: EstimateRequest, parallel: Parallelism, multiple_of: int, above: int = 0) -> int | None:
    """Return the number of tokens of the longest sequence that fits with a parallelism, or None if none fits.

    Args:
        request: Training to estimate. Its sequence length is ignored.
        parallel: Sizes of the parallelism.
        multiple_of: Number of tokens that lengths are multiples of.
        above: Only longer sequences are tried.
    """
    step = math.lcm(multiple_of, parallel.tp * parallel.cp)

    def fits(steps: int) -> bool:
        tokens = steps * step
        return tokens <= MOST_TOKENS and estimate(replace(request, seq_len=tokens), parallel).status == "ok"

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


def candidate_parallelisms(request: EstimateRequest, forced: Sizes) -> list[Parallelism]:
    """Return all parallelisms that a training allows.

    Raises:
        ValueError: There are none. The message is one line with the reasons and the changes that would help.
    """
    allowed = list(_allowed(request, forced))
    if not allowed:
        raise ValueError(_wrong_product(request, forced) or _nothing_divides(request, forced))
    return allowed


def left_out_sentence(request: EstimateRequest, forced: Sizes) -> str:
    """Describe the parallelisms that only the sequence length excludes; empty if there are none."""
    sizes = [parallel.tp * parallel.cp for parallel in _ruled_out_by(SEQUENCE, request, forced)]
    if not sizes:
        return ""
    lengths = _multiples_near(request.seq_len, math.lcm(*sizes))
    return (
        f"Not considered: parallelisms with TP x CP = {_listed(sizes)}, which does not divide "
        f"{request.seq_len:,} tokens. They are possible with {_listed(lengths, ',')} tokens."
    )


def nearest_counts(counts: Iterable[int], wanted: int) -> list[int]:
    """Return the nearest number below and the nearest one above, if they exist."""
    counts = list(counts)
    lower, higher = [n for n in counts if n < wanted], [n for n in counts if n > wanted]
    return [*([max(lower)] if lower else []), *([min(higher)] if higher else [])]


def _allowed(request: EstimateRequest, forced: Sizes) -> Iterator[Parallelism]:
    return (parallel for parallel in _products(request, forced) if not any(_obstacles(request, parallel)))


def _obstacles(request: EstimateRequest, parallel: Parallelism) -> tuple[Obstacle | str, ...]:
    divided = parallel.obstacles(request.shape, request.seq_len, request.batch_size)
    return *divided, why_not_parallel(request, parallel)


def _products(request: EstimateRequest, forced: Sizes) -> Iterator[Parallelism]:
    """Parallelisms of all devices with the given sizes. With one rank, all ZeRO stages are equal."""
    gpus = request.gpus
    for tp in _divisors(gpus, forced.get("tp")):
        for cp in _divisors(gpus // tp, forced.get("cp")):
            for pp in _divisors(gpus // tp // cp, forced.get("pp")):
                dp = gpus // tp // cp // pp
                if dp == forced.get("dp", dp):
                    sharded = (0, 1, 2, 3) if dp * cp > 1 else (0,)
                    stages = [forced["zero_stage"]] if "zero_stage" in forced else sharded
                    for stage, groups in product(stages, _expert_sizes(request, dp * cp, forced)):
                        yield Parallelism(
                            tp=tp, cp=cp, dp=dp, pp=pp, zero_stage=stage, expert_parallel_size=groups,
                            virtual_pipeline_size=forced.get("virtual_pipeline_size", 1),
                            pipeline_schedule=forced.get("pipeline_schedule", "1f1b"),
                        )  # fmt: skip


def _expert_sizes(request: EstimateRequest, ranks: int, forced: Sizes) -> list[int]:
    """Sizes of expert parallelism: the given one, or those that divide the ranks of a mixture."""
    if "expert_parallel_size" in forced:
        return [forced["expert_parallel_size"]]
    return _divisors(ranks) if request.shape.experts > 1 else [1]


def _divisors(number: int, forced: int | None = None) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0 and forced in (None, size)]


def _ruled_out_by(what: str, request: EstimateRequest, forced: Sizes) -> Iterator[Parallelism]:
    """Parallelisms that are excluded by one obstacle only."""
    for parallel in _products(request, forced):
        obstacles = [obstacle for obstacle in _obstacles(request, parallel) if obstacle]
        if obstacles and all(isinstance(each, Obstacle) and each.of == what for each in obstacles):
            yield parallel


def _given(forced: Sizes) -> dict[str, Any]:
    """What the user gave."""
    return {name: size for name, size in forced.items() if name not in _DEFAULTS or size != _DEFAULTS[name]}


def _wrong_product(request: EstimateRequest, forced: Sizes) -> str:
    """Message if the given sizes do not divide the number of GPUs; otherwise empty."""
    gpus, sizes = request.gpus, {name: size for name, size in _given(forced).items() if name in _DEVICES}
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


def _nothing_divides(request: EstimateRequest, forced: Sizes) -> str:
    smallest: dict[str, Obstacle] = {}
    others: dict[str, None] = {}
    for parallel in _products(request, forced):
        first = next(obstacle for obstacle in _obstacles(request, parallel) if obstacle)
        if isinstance(first, str):
            others[first] = None
        else:
            smallest[first.of] = min(first, smallest.get(first.of, first))
    why_not = "; ".join([*map(str, smallest.values()), *others])
    given = ", ".join([f"gpus={request.gpus}", *(f"parallel.{name}={size}" for name, size in _given(forced).items())])
    changes = ", or ".join(_remedies(request, forced))
    remedies = f"give {changes}" if changes else "give other sizes, or leave them out"
    return f"{given}: no such parallelism is possible ({why_not}): {remedies}"


def _remedies(request: EstimateRequest, forced: Sizes) -> Iterator[str]:
    """Single changes that make a parallelism possible."""
    values = {"zero_stage": range(4), "pipeline_schedule": get_args(Schedule)}
    for name in _given(forced):
        possible = [
            size for size in values.get(name, _divisors(request.gpus)) if any(_allowed(request, {**forced, name: size}))
        ]
        if possible:
            yield f"parallel.{name}={_listed(possible)}"
    divided = (n for n in request.cluster.device_counts if any(_allowed(replace(request, gpus=n), forced)))
    if counts := nearest_counts(divided, request.gpus):
        yield f"gpus={_listed(counts)}"
    if groups := [parallel.dp for parallel in _ruled_out_by(BATCH, request, forced)]:
        yield f"batch_size={_listed(_multiples_near(request.batch_size, min(groups)))}"
    if sizes := [parallel.tp * parallel.cp for parallel in _ruled_out_by(SEQUENCE, request, forced)]:
        yield f"seq_len={_listed(_multiples_near(request.seq_len, math.lcm(*sizes)))}"


def _multiples_near(number: int, step: int) -> list[int]:
    """The multiples of a step below and above a number that is not a multiple itself."""
    lower = number // step * step
    return [multiple for multiple in (lower, lower + step) if multiple]


def _listed(numbers: Iterable[int | str], separator: str = "") -> str:
    *others, last = (f"{number:{separator}}" for number in sorted(set(numbers)))
    return f"{', '.join(others)} or {last}" if others else last


def why_slower(request: EstimateRequest, answer: Estimate, best: Estimate) -> str:
    """Returns the reason why an estimate is worse than the best one: missing memory, or the part that takes longer.

    Args:
        request: Training of both estimates.
        answer: Estimate that is worse.
        best: Estimate that was chosen.
    """
    if answer.status == "oom":
        return _device(request, answer)
    if answer.status == "oohm":
        host = request.cluster.host_bytes * request.constants.host_share
        return f"host: {_of(answer.host_bytes, host)} per node"
    assert answer.step_seconds is not None and best.step_seconds is not None
    slower = answer.step_seconds / best.step_seconds - 1
    mine, others = step_parts(request, answer), step_parts(request, best)
    more, what = max((seconds - others[name], name) for name, seconds in mine.items())
    if slower < 0.0005 or more <= 0:
        return "equally fast, needs more memory" if _total(answer) > _total(best) else "equally fast"
    network = " over the network" if _leaves_node(request, answer, what) else ""
    percent = f"{100 * slower:.0f}" if slower > 0.1 else f"{100 * slower:.2g}"
    return f"{percent} % slower: {what}{network}, {about_seconds(more)} more"


def step_parts(request: EstimateRequest, answer: Estimate) -> dict[str, float]:
    """Divides the time of a step that fits into its parts, in seconds.

    Args:
        request: Training to estimate.
        answer: Estimate of the request.
    """
    assert answer.step_seconds is not None
    parallel = answer.parallel
    request = request.with_kernels(parallel)
    runs = [(run.shape.layers, layer_times(run, parallel)) for run in request.runs(parallel)]
    sequences = request.batch_size // parallel.dp
    again = (answer.recompute_seconds or 0.0) / sequences
    in_layers = sum(count * times.computing for count, times in runs)
    tensor = sum(count * times.tensor_parallel for count, times in runs)
    context = sum(count * times.context_parallel for count, times in runs)
    expert = sum(count * times.expert_parallel for count, times in runs)
    computing = in_layers + outside_seconds(request, parallel)
    passing = tensor + context + expert + again
    parts = {
        "computing": sequences * computing + optimizer_seconds(request, parallel),
        "recomputing": sequences * again,
        _TENSOR: sequences * tensor,
        _CONTEXT: sequences * context,
        _EXPERT: sequences * expert,
        _DATA: data_parallel_seconds(request, parallel, sequences * (computing + passing)),
        "idle pipeline stages": idle_seconds(request, parallel, in_layers + passing),
        _STAGES: message_seconds(request, parallel),
    }
    return {**parts, "copies not hidden by computation": max(answer.step_seconds - sum(parts.values()), 0.0)}


def _device(request: EstimateRequest, answer: Estimate) -> str:
    room = device_budget(request, answer.parallel).device_bytes
    largest = max(
        (category for category in answer.device_bytes if category != "total"), key=answer.device_bytes.__getitem__
    )
    size = format_bytes(answer.device_bytes[largest])
    return f"device: {_of(_total(answer), room)}, {largest.replace('_', ' ')} {size}"


def _of(need: float, room: float) -> str:
    return f"{need / 2**30:,.1f} of {room / 2**30:,.1f} GiB"


def _total(answer: Estimate) -> int:
    return answer.device_bytes["total"]


def _leaves_node(request: EstimateRequest, answer: Estimate, what: str) -> bool:
    parallel = answer.parallel
    neighbours = {
        _TENSOR: parallel.tp,
        _CONTEXT: parallel.tp * parallel.cp,
        _EXPERT: parallel.tp * parallel.expert_parallel_size,
        _DATA: request.gpus // parallel.pp,
        _STAGES: request.gpus if parallel.pp > 1 else 1,
    }
    return neighbours.get(what, 1) > request.cluster.devices_per_node
