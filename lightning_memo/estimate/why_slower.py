"""Explains in a few words why one parallelism is worse than another."""

from __future__ import annotations

from lightning_memo.estimate.request.estimate_request import Estimate, Question
from lightning_memo.estimate.step.planner_inputs import device_budget
from lightning_memo.estimate.times.layer_times import data_parallel_seconds, layer_times
from lightning_memo.estimate.times.outside_times import optimizer_seconds, outside_seconds
from lightning_memo.estimate.times.pipeline_times import idle_seconds, message_seconds
from lightning_memo.utils.units import format_bytes, format_seconds

_TENSOR, _CONTEXT, _DATA = "tensor-parallel traffic", "context-parallel traffic", "data-parallel traffic"
_EXPERT, _STAGES = "expert-parallel traffic", "messages between pipeline stages"


def why_slower(question: Question, answer: Estimate, best: Estimate) -> str:
    """Returns the reason why an estimate is worse than the best one: missing memory, or the part that takes longer.

    Args:
        question: Question of both estimates.
        answer: Estimate that is worse.
        best: Estimate that was chosen.
    """
    if answer.status == "oom":
        return _device(question, answer)
    if answer.status == "oohm":
        host = question.cluster.host_bytes * question.constants.host_share
        return f"host: {_of(answer.host_bytes, host)} per node"
    assert answer.step_seconds is not None and best.step_seconds is not None
    slower = answer.step_seconds / best.step_seconds - 1
    mine, others = step_parts(question, answer), step_parts(question, best)
    more, what = max((seconds - others[name], name) for name, seconds in mine.items())
    if slower < 0.0005 or more <= 0:
        return "equally fast, needs more memory" if _total(answer) > _total(best) else "equally fast"
    network = " over the network" if _leaves_node(question, answer, what) else ""
    percent = f"{100 * slower:.0f}" if slower > 0.1 else f"{100 * slower:.2g}"
    return f"{percent} % slower: {what}{network}, {format_seconds(more)} more"


def step_parts(question: Question, answer: Estimate) -> dict[str, float]:
    """Divides the time of a step that fits into its parts, in seconds.

    Args:
        question: Question that was asked.
        answer: Estimate of the question.
    """
    assert answer.step_seconds is not None
    parallel = answer.parallel
    runs = [(run.shape.layers, layer_times(run, parallel)) for run in question.runs(parallel)]
    sequences = question.batch_size // parallel.dp
    again = (answer.recompute_seconds or 0.0) / sequences
    in_layers = sum(count * times.computing for count, times in runs)
    tensor = sum(count * times.tensor_parallel for count, times in runs)
    context = sum(count * times.context_parallel for count, times in runs)
    expert = sum(count * times.expert_parallel for count, times in runs)
    computing = in_layers + outside_seconds(question, parallel)
    passing = tensor + context + expert + again
    parts = {
        "computing": sequences * computing + optimizer_seconds(question, parallel),
        "recomputing": sequences * again,
        _TENSOR: sequences * tensor,
        _CONTEXT: sequences * context,
        _EXPERT: sequences * expert,
        _DATA: data_parallel_seconds(question, parallel, sequences * (computing + passing)),
        "idle pipeline stages": idle_seconds(question, parallel, in_layers + passing),
        _STAGES: message_seconds(question, parallel),
    }
    return {**parts, "copies not hidden by computation": max(answer.step_seconds - sum(parts.values()), 0.0)}


def _device(question: Question, answer: Estimate) -> str:
    room = device_budget(question, answer.parallel).device_bytes
    largest = max(
        (category for category in answer.device_bytes if category != "total"), key=answer.device_bytes.__getitem__
    )
    size = format_bytes(answer.device_bytes[largest])
    return f"device: {_of(_total(answer), room)}, {largest.replace('_', ' ')} {size}"


def _of(need: float, room: float) -> str:
    return f"{need / 2**30:,.1f} of {room / 2**30:,.1f} GiB"


def _total(answer: Estimate) -> int:
    return answer.device_bytes["total"]


def _leaves_node(question: Question, answer: Estimate, what: str) -> bool:
    parallel = answer.parallel
    neighbours = {
        _TENSOR: parallel.tp,
        _CONTEXT: parallel.tp * parallel.cp,
        _EXPERT: parallel.tp * parallel.expert_parallel_size,
        _DATA: question.gpus // parallel.pp,
        _STAGES: question.gpus if parallel.pp > 1 else 1,
    }
    return neighbours.get(what, 1) > question.cluster.devices_per_node
