"""Estimates the time and memory of a training step: the entry point of the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.estimate_request import Estimate, Question, Status
from lightning_memo.estimate.request.training_methods import (
    METHOD_TRAITS,
    check_question,
    element_bytes,
    runs_here,
    why_not_by_method,
)
from lightning_memo.estimate.step.activation_fractions import activations_sentence
from lightning_memo.estimate.step.device_bytes import device_state_bytes
from lightning_memo.estimate.step.layers_estimate import LayersEstimate
from lightning_memo.estimate.step.planner_inputs import (
    device_budget,
    devices_per_host,
    sequences_in_flight,
)
from lightning_memo.estimate.step.resident_methods import estimate_fpdt, estimate_resident
from lightning_memo.estimate.step.swapping_methods import estimate_swapping
from lightning_memo.estimate.step.waiting_gradients import fullest_stages, waiting_bytes
from lightning_memo.estimate.times.layer_times import data_parallel_seconds
from lightning_memo.estimate.times.outside_times import optimizer_seconds, outside_seconds
from lightning_memo.estimate.times.pipeline_times import idle_seconds, message_seconds, pipeline_sentence
from lightning_memo.utils.units import format_bytes


def estimate(question: Question, parallel: Parallelism) -> Estimate:
    """Estimate the time and memory of a training step with a given parallelism.

    Raises:
        ValueError: The number of devices differs from the question, the parallelism does not divide the model, or alpha
            is above 1 or given for a method without alpha.
    """
    _refuse(question, parallel)
    answers = [_estimate_stage(replace(question, stage=stage), parallel) for stage in fullest_stages(parallel)]
    return replace(max(answers, key=_need), host_bytes=max(answer.host_bytes for answer in answers))


def _need(answer: Estimate) -> tuple[float, ...]:
    """Sort key of stages: those that do not fit come last, then the slowest ones, then the fullest ones."""
    return ("ok", "oom", "oohm").index(answer.status), answer.step_seconds or 0.0, answer.device_bytes["total"]


def _estimate_stage(question: Question, parallel: Parallelism) -> Estimate:
    traits = METHOD_TRAITS[question.method]
    if traits.recomputes == "alpha":
        outcome = estimate_swapping(question, parallel)
    else:
        outcome = estimate_fpdt(question, parallel) if traits.streamed else estimate_resident(question, parallel)
    device_bytes = _device_bytes(question, parallel, outcome)
    status, limits = _fit(question, parallel, outcome, device_bytes["total"])
    seconds = step_seconds_of(question, parallel, outcome) if status == "ok" else None
    peak = question.cluster.peak_flops * question.gpus
    tokens = question.seq_len * question.batch_size
    model_flops = question.batch_size * question.shape.model_flops(question.seq_len)
    hardware_flops = model_flops + question.batch_size * outcome.recomputed_flops
    again = question.batch_size // parallel.dp * outcome.recompute_seconds
    return Estimate(
        status=status,
        method=question.method,
        model=question.shape.name,
        seq_len=question.seq_len,
        gpus=question.gpus,
        parallel=parallel,
        alpha=outcome.alpha,
        storage=outcome.storage,
        step_seconds=seconds,
        recompute_seconds=None if seconds is None else again,
        mfu=None if seconds is None else 100 * model_flops / seconds / peak,
        hfu=None if seconds is None else 100 * hardware_flops / seconds / peak,
        tokens_per_gpu_per_second=None if seconds is None else tokens / seconds / question.gpus,
        device_bytes=device_bytes,
        disk_bytes=outcome.disk_bytes * devices_per_host(question),
        slices=question.slices,
        host_bytes=outcome.host_bytes * devices_per_host(question) * sequences_in_flight(question, parallel),
        speeds=question.constants.note,
        limits=[*filter(None, _sentences(question, parallel, outcome)), *limits],
    )


def _sentences(question: Question, parallel: Parallelism, outcome: LayersEstimate) -> Iterator[str]:
    """Sentences about activations and about stages of a pipeline, which may be empty."""
    yield activations_sentence(METHOD_TRAITS[question.method], outcome)
    yield pipeline_sentence(question, parallel, outcome.seconds - outside_seconds(question, parallel))
    if size := waiting_bytes(question, parallel):
        yield (
            f"Stage {question.stage + 1} of {parallel.pp} needs the most: gradients of weights that wait take up to "
            f"{format_bytes(size)} on a device."
        )


def _fit(question: Question, parallel: Parallelism, outcome: LayersEstimate, total: int) -> tuple[Status, list[str]]:
    """Whether training fits, and sentences about its limits or about the memory that is too small."""
    device = total > device_budget(question, parallel).device_bytes
    notes = _precision_notes(question)
    if outcome.status == "ok" and not device:
        return "ok", [*outcome.limits, *notes]
    missing = [_missing_on_device(question, parallel, total)] if device else []
    if outcome.status == "oohm":
        missing.append(_missing_on_host(question, parallel, outcome.host_bytes))
    return ("oom" if outcome.status == "ok" else "oohm"), [*missing, *notes]


def _missing_on_device(question: Question, parallel: Parallelism, total: int) -> str:
    state, usable = device_state_bytes(question, parallel).total, device_budget(question, parallel).device_bytes
    kinds = "weights, gradients and the optimizer"
    activations = f"Activations of {question.seq_len:,} tokens need {format_bytes(total - state)}"
    if state > usable:
        return (
            f"Device memory is too small for the model state: {kinds} need {format_bytes(state)}, "
            f"{format_bytes(usable)} are usable. {activations} more."
        )
    return (
        f"Device memory is too small for the activations: beside {kinds} ({format_bytes(state)}), "
        f"{format_bytes(usable - state)} are usable. {activations}."
    )


def _missing_on_host(question: Question, parallel: Parallelism, needed_bytes: int) -> str:
    each = devices_per_host(question) * sequences_in_flight(question, parallel)
    disk = f", and {format_bytes(question.spill_bytes)} on its disk" if question.spill_bytes else ""
    return (
        f"Host memory is too small: activations need {format_bytes(needed_bytes * each)} on each node, "
        f"{format_bytes(question.cluster.host_bytes * question.constants.host_share)} are usable "
        f"({question.constants.host_share:.0%} of cluster.host_bytes){disk}."
    )


def _refuse(question: Question, parallel: Parallelism) -> None:
    if parallel.devices != question.gpus:
        raise ValueError(
            f"tp={parallel.tp} x cp={parallel.cp} x dp={parallel.dp} x pp={parallel.pp} is {parallel.devices} devices, "
            f"but gpus={question.gpus}: give sizes whose product is gpus"
        )
    if question.shape.adapters is not None and not runs_here(question):
        raise ValueError(
            f"method={question.method} on cluster={question.cluster.name}: the papers' programs train "
            "all weights; give "
            "method=memo, full_recompute, full_swap or plain on another cluster than a800, or model.lora.r=0"
        )
    check_question(question)
    obstacles = parallel.obstacles(question.shape, question.seq_len, question.batch_size)
    why_not = [*map(str, obstacles), why_not_by_method(question, parallel)][0]
    if why_not:
        raise ValueError(f"{why_not}: choose another parallelism")
    if question.alpha is not None and question.alpha > 1:
        raise ValueError(f"alpha={question.alpha:g} must be from 0 to 1")
    if question.alpha is not None and question.method != "memo":
        raise ValueError(f"alpha={question.alpha:g} has no effect with method={question.method}: leave it out")


def _device_bytes(question: Question, parallel: Parallelism, outcome: LayersEstimate) -> dict[str, int]:
    """Device memory by category, including the model state, and the sum as "total"."""
    state = {category: round(size) for category, size in asdict(device_state_bytes(question, parallel)).items()}
    categories = {**state, **outcome.device_bytes, "later_weight_gradients": waiting_bytes(question, parallel)}
    return {**categories, "total": sum(categories.values())}


def step_seconds_of(question: Question, parallel: Parallelism, outcome: LayersEstimate) -> float:
    """Return the time of a step."""
    sequences = question.batch_size // parallel.dp
    idle = idle_seconds(question, parallel, outcome.seconds - outside_seconds(question, parallel))
    computing, waiting = sequences * outcome.seconds, idle + message_seconds(question, parallel)
    synchronizing = data_parallel_seconds(question, parallel, computing)
    return computing + waiting + synchronizing + optimizer_seconds(question, parallel)


def _precision_notes(question: Question) -> list[str]:
    """Sentences about a precision that has no effect, or whose speed is an assumption."""
    if question.precision == "bf16-mixed":
        return []
    if not runs_here(question):
        return [
            "The estimate is for a paper's program in its own mixed precision: "
            f"precision={question.precision} has no effect."
        ]
    if element_bytes(question).rate == 1:
        return []
    return ["Matrix products in fp32 are assumed to use TF32, at half the peak of bf16."]
