"""Estimates the time and memory of a training step: the entry point of the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from lightning_memo.artifacts.costs import ATTENTION, INPUT, OTHER, LayerCosts
from lightning_memo.artifacts.plan import Plan
from lightning_memo.estimate.device_bytes import (
    device_state_bytes,
    fullest_stages,
    gathered_bytes,
    logits_bytes,
    waiting_bytes,
)
from lightning_memo.estimate.planner_inputs import (
    device_budget,
    devices_per_host,
    estimated_layer_costs,
    has_known_step,
    known_step,
    recomputed_work,
    sequences_in_flight,
    shares_by_place,
)
from lightning_memo.estimate.request import (
    Estimate,
    EstimateRequest,
    Parallelism,
    Status,
    Storage,
    check_request,
    why_not_parallel,
)
from lightning_memo.estimate.step_buffers import PlannedCall, PlannedSlice, PlannedStep
from lightning_memo.estimate.step_times import (
    data_parallel_seconds,
    idle_seconds,
    layer_times,
    message_seconds,
    optimizer_seconds,
    outside_seconds,
    pipeline_sentence,
)
from lightning_memo.estimate.training_plan import (
    all_but_input,
    by_category,
    bytes_of_plan,
    memory_at,
    saved_names,
    training_plan,
)
from lightning_memo.planner import HostMemoryError
from lightning_memo.utils.units import format_bytes

_KINDS = {INPUT: "layer inputs", ATTENTION: "attention outputs", OTHER: "all other tensors"}
_PLACES = {"device": "kept on the device", "host": "swapped", "disk": "on the disk", "recompute": "recomputed"}
_LEAST = 0.0005


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersEstimate:
    """Prediction for the layers of one sequence on the fullest device, without the model state."""

    status: Status
    alpha: float | None
    seconds: float
    """Time of forward and backward of all layers of a pipeline stage, and of the head."""

    recomputed: float
    """Fraction of the tokens whose activations are recomputed, or some of them if a plan names kinds of tensors."""

    recomputed_flops: float
    """FLOPs of the recomputation of one sequence, on all devices."""

    recompute_seconds: float
    """Part of `seconds` for recomputation, also if copies hide it."""

    device_bytes: dict[str, int]
    """Device memory by category."""

    host_bytes: int
    disk_bytes: int = 0
    runs_again: bool = False
    """Whether some layers store nothing in the forward, and run again in the backward."""

    storage: Storage | None = None
    """What becomes of each kind of tensor; None without a plan by kinds."""

    limits: list[str]


def estimate(request: EstimateRequest, parallel: Parallelism) -> Estimate:
    """Estimate the time and memory of a training step with a given parallelism.

    Raises:
        ValueError: The number of devices differs from the request, the parallelism does not divide the model, or alpha
            is above 1 or given for a method without alpha.
    """
    _refuse(request, parallel)
    request = request.with_kernels(parallel)
    answers = [_estimate_stage(replace(request, stage=stage), parallel) for stage in fullest_stages(parallel)]
    return replace(max(answers, key=_need), host_bytes=max(answer.host_bytes for answer in answers))


def _need(answer: Estimate) -> tuple[float, ...]:
    """Sort key of stages: those that do not fit come last, then the slowest ones, then the fullest ones."""
    return ("ok", "oom", "oohm").index(answer.status), answer.step_seconds or 0.0, answer.device_bytes["total"]


def _estimate_stage(request: EstimateRequest, parallel: Parallelism) -> Estimate:
    outcome = (estimate_swapping if request.swaps else estimate_resident)(request, parallel)
    device_bytes = _device_bytes(request, parallel, outcome)
    status, limits = _fit(request, parallel, outcome, device_bytes["total"])
    seconds = step_seconds_of(request, parallel, outcome) if status == "ok" else None
    peak = request.cluster.peak_flops * request.gpus
    tokens = request.seq_len * request.batch_size
    model_flops = request.batch_size * request.shape.model_flops(request.seq_len)
    hardware_flops = model_flops + request.batch_size * outcome.recomputed_flops
    again = request.batch_size // parallel.dp * outcome.recompute_seconds
    return Estimate(
        status=status,
        method=request.method,
        model=request.shape.name,
        seq_len=request.seq_len,
        gpus=request.gpus,
        parallel=parallel,
        alpha=outcome.alpha,
        storage=outcome.storage,
        step_seconds=seconds,
        recompute_seconds=None if seconds is None else again,
        mfu=None if seconds is None else 100 * model_flops / seconds / peak,
        hfu=None if seconds is None else 100 * hardware_flops / seconds / peak,
        tokens_per_gpu_per_second=None if seconds is None else tokens / seconds / request.gpus,
        device_bytes=device_bytes,
        disk_bytes=outcome.disk_bytes * devices_per_host(request),
        slices=request.slices,
        host_bytes=outcome.host_bytes * devices_per_host(request) * sequences_in_flight(request, parallel),
        speeds=request.constants.note,
        limits=[*filter(None, _sentences(request, parallel, outcome)), *limits],
    )


def _sentences(request: EstimateRequest, parallel: Parallelism, outcome: LayersEstimate) -> Iterator[str]:
    """Sentences about activations and about stages of a pipeline, which may be empty."""
    yield activations_sentence(request, outcome)
    yield pipeline_sentence(request, parallel, outcome.seconds - outside_seconds(request, parallel))
    if size := waiting_bytes(request, parallel):
        yield (
            f"Stage {request.stage + 1} of {parallel.pp} needs the most: gradients of weights that wait take up to "
            f"{format_bytes(size)} on a device."
        )


def _fit(
    request: EstimateRequest, parallel: Parallelism, outcome: LayersEstimate, total: int
) -> tuple[Status, list[str]]:
    """Whether training fits, and sentences about its limits or about the memory that is too small."""
    device = total > device_budget(request, parallel).device_bytes
    notes = _precision_notes(request)
    if outcome.status == "ok" and not device:
        return "ok", [*outcome.limits, *notes]
    missing = [_missing_on_device(request, parallel, total)] if device else []
    if outcome.status == "oohm":
        missing.append(_missing_on_host(request, parallel, outcome.host_bytes))
    return ("oom" if outcome.status == "ok" else "oohm"), [*missing, *notes]


def _missing_on_device(request: EstimateRequest, parallel: Parallelism, total: int) -> str:
    state, usable = device_state_bytes(request, parallel).total, device_budget(request, parallel).device_bytes
    kinds = "weights, gradients and the optimizer"
    activations = f"Activations of {request.seq_len:,} tokens need {format_bytes(total - state)}"
    if state > usable:
        return (
            f"Device memory is too small for the model state: {kinds} need {format_bytes(state)}, "
            f"{format_bytes(usable)} are usable. {activations} more."
        )
    return (
        f"Device memory is too small for the activations: beside {kinds} ({format_bytes(state)}), "
        f"{format_bytes(usable - state)} are usable. {activations}."
    )


def _missing_on_host(request: EstimateRequest, parallel: Parallelism, needed_bytes: int) -> str:
    each = devices_per_host(request) * sequences_in_flight(request, parallel)
    disk = f", and {format_bytes(request.disk_bytes)} on its disk" if request.disk_bytes else ""
    return (
        f"Host memory is too small: activations need {format_bytes(needed_bytes * each)} on each node, "
        f"{format_bytes(request.cluster.host_bytes * request.constants.host_share)} are usable "
        f"({request.constants.host_share:.0%} of cluster.host_bytes){disk}."
    )


def _refuse(request: EstimateRequest, parallel: Parallelism) -> None:
    if parallel.devices != request.gpus:
        raise ValueError(
            f"tp={parallel.tp} x cp={parallel.cp} x dp={parallel.dp} x pp={parallel.pp} is {parallel.devices} devices, "
            f"but gpus={request.gpus}: give sizes whose product is gpus"
        )
    check_request(request)
    obstacles = parallel.obstacles(request.shape, request.seq_len, request.batch_size)
    why_not = [*map(str, obstacles), why_not_parallel(request, parallel)][0]
    if why_not:
        raise ValueError(f"{why_not}: choose another parallelism")
    if request.alpha is not None and request.alpha > 1:
        raise ValueError(f"alpha={request.alpha:g} must be from 0 to 1")
    if request.alpha is not None and request.method != "memo":
        raise ValueError(f"alpha={request.alpha:g} has no effect with method={request.method}: leave it out")


def _device_bytes(request: EstimateRequest, parallel: Parallelism, outcome: LayersEstimate) -> dict[str, int]:
    """Device memory by category, including the model state, and the sum as "total"."""
    state = {category: round(size) for category, size in asdict(device_state_bytes(request, parallel)).items()}
    categories = {**state, **outcome.device_bytes, "later_weight_gradients": waiting_bytes(request, parallel)}
    return {**categories, "total": sum(categories.values())}


def step_seconds_of(request: EstimateRequest, parallel: Parallelism, outcome: LayersEstimate) -> float:
    """Return the time of a step."""
    sequences = request.batch_size // parallel.dp
    idle = idle_seconds(request, parallel, outcome.seconds - outside_seconds(request, parallel))
    computing, waiting = sequences * outcome.seconds, idle + message_seconds(request, parallel)
    synchronizing = data_parallel_seconds(request, parallel, computing)
    return computing + waiting + synchronizing + optimizer_seconds(request, parallel)


def _precision_notes(request: EstimateRequest) -> list[str]:
    """A sentence about a precision whose speed is an assumption."""
    if not request.uses_tf32:
        return []
    return ["Matrix products in fp32 are assumed to use TF32, at half the peak of bf16."]


def estimate_swapping(request: EstimateRequest, parallel: Parallelism) -> LayersEstimate:
    """Estimate a method that swaps, from the plan for it."""
    costs, room = estimated_layer_costs(request, parallel), device_budget(request, parallel)
    try:
        plan = training_plan(request, parallel, costs, room)
    except HostMemoryError as error:
        reason = str(error).replace("host_memory", "cluster.host_bytes")  # else MemoStrategy's setting
        return _too_much_for_host(request, parallel, costs, reason)
    return _swapped(request, parallel, plan)


def _swapped(request: EstimateRequest, parallel: Parallelism, plan: Plan) -> LayersEstimate:
    costs, swap = plan.costs, plan.swap
    share = swap.recomputed
    recomputed = share * request.shape.recomputed_flops(request.seq_len)
    seconds = share * sum(costs.recompute_seconds)
    if plan.storage_costs is not None:
        recomputed, seconds = recomputed_work(request, parallel, plan)
    if again := swap.storage.calls_again:
        recomputed += again / swap.calls * request.shape.forward_flops(request.seq_len)
        seconds += sum(costs.forward_seconds[:again])
    return LayersEstimate(
        status="ok",
        alpha=swap.alpha,
        seconds=plan.step_seconds,
        recomputed=share,
        recomputed_flops=recomputed,
        recompute_seconds=seconds,
        storage=None if plan.storage_costs is None else shares_by_place(plan),
        device_bytes=bytes_of_plan(request, parallel, plan),
        host_bytes=swap.host_bytes,
        disk_bytes=swap.disk_bytes,
        runs_again=bool(again),
        limits=[plan.reason],
    )


def _too_much_for_host(
    request: EstimateRequest, parallel: Parallelism, costs: LayerCosts, reason: str
) -> LayersEstimate:
    """Memory that would be needed on the device and the host without the host limit."""
    alpha = request.alpha if request.alpha is not None else float(request.method == "full_swap")
    memory, working = memory_at(request, costs, alpha), costs.working_bytes(1.0 - alpha)
    host_bytes = memory.host
    if (slices := request.sliced(costs.tokens)) is not None:
        working = costs.working_bytes(min(slices.tokens / costs.tokens, 1.0 - alpha))
    else:
        host_bytes = sum(costs.swapped_bytes(call, alpha) for call in range(costs.swapped_calls))
    return LayersEstimate(
        status="oohm",
        alpha=alpha,
        seconds=0.0,
        recomputed=1.0 - alpha,
        recomputed_flops=0.0,
        recompute_seconds=0.0,
        device_bytes=by_category(request, parallel, memory.buffer_bytes, 0, working, costs.transient_device_bytes),
        host_bytes=host_bytes,
        limits=[f"{reason[0].upper()}{reason[1:]}."],
    )


def estimate_resident(request: EstimateRequest, parallel: Parallelism) -> LayersEstimate:
    """Estimate a method that copies nothing to the host."""
    recomputes, costs = request.recomputes, estimated_layer_costs(request, parallel)
    if recomputes and has_known_step(request) and parallel.pp == 1:
        return _resident(request, parallel, costs, _checkpointed_bytes(request, parallel, costs))
    kept = _kept_bytes(request, costs) if recomputes else costs.skeletal_bytes // costs.calls
    activations = kept * costs.calls
    others = max(map(sum, zip(costs.attention_bytes, costs.other_bytes, strict=True)))
    recomputed_bytes = (max(costs.other_bytes) if request.keeps_attention else others) if recomputes else 0
    in_backward = costs.backward_device_bytes + recomputed_bytes
    first_stage = activations * sequences_in_flight(request, parallel) + in_backward
    at_loss = costs.transient_device_bytes
    last_stage = activations + max(in_backward, at_loss)
    logits = round(logits_bytes(request, parallel)) if at_loss > in_backward else 0
    if first_stage > last_stage:
        activations, logits = first_stage - in_backward, 0
    alive = max(first_stage, last_stage)
    device_bytes = {
        "activations": activations,
        "transients": alive - activations - logits,
        "logits": logits,
        "gathered": round(gathered_bytes(request, parallel)),
    }
    return _resident(request, parallel, costs, device_bytes)


def _checkpointed_bytes(request: EstimateRequest, parallel: Parallelism, costs: LayerCosts) -> dict[str, int]:
    """Bytes of a step that keeps layer inputs, maybe with outputs of attention, and computes the rest again."""
    kept, made = _kept_bytes(request, costs), all_but_input(request)
    if request.keeps_attention:
        made -= saved_names(request, "attention")
    call = PlannedCall(slices=(PlannedSlice(tokens=costs.tokens, made=made),), kept_bytes=kept)
    step = PlannedStep(step=known_step(request, parallel), calls=[call] * costs.calls, checkpointed=True)
    activations = costs.calls * kept
    return {
        "activations": activations,
        "transients": step.peak_bytes - activations,
        "logits": 0,
        "gathered": round(gathered_bytes(request, parallel)),
    }


def _kept_bytes(request: EstimateRequest, costs: LayerCosts) -> int:
    """Bytes that a layer keeps for its backward if it is computed again."""
    return costs.input_bytes[0] + (costs.attention_bytes[0] if request.keeps_attention else 0)


def _resident(
    request: EstimateRequest, parallel: Parallelism, costs: LayerCosts, device_bytes: dict[str, int]
) -> LayersEstimate:
    recomputes = request.recomputes
    if not recomputes:  # memory is not planned
        device_bytes["fragmentation"] = round(request.constants.fragmentation * sum(device_bytes.values()))
    flops = request.shape.forward_flops(request.seq_len, with_attention=not request.keeps_attention)
    return LayersEstimate(
        status="ok",
        alpha=None,
        seconds=_seconds(request, parallel, costs),
        recomputed=float(recomputes),
        recomputed_flops=flops if recomputes else 0.0,
        recompute_seconds=sum(_recompute_seconds(request, parallel)) if recomputes else 0.0,
        device_bytes=device_bytes,
        host_bytes=0,
        limits=[],
    )


def _seconds(request: EstimateRequest, parallel: Parallelism, costs: LayerCosts) -> float:
    """Time of the layers and the head without any copies."""
    again = sum(_recompute_seconds(request, parallel)) if request.recomputes else 0.0
    return costs.outside_seconds + sum(costs.forward_seconds) + sum(costs.backward_seconds) + again


def _recompute_seconds(request: EstimateRequest, parallel: Parallelism) -> tuple[float, ...]:
    """Time to compute each layer of a pipeline stage again."""
    runs = [(run.shape.layers, layer_times(run, parallel)) for run in request.runs(parallel)]
    again = ((layers, t.recompute if request.keeps_attention else t.forward) for layers, t in runs)
    return sum(((seconds,) * layers for layers, seconds in again), ())


def activations_sentence(request: EstimateRequest, outcome: LayersEstimate) -> str:
    """Describe what happens to the activations of a layer, in fractions of the tokens.

    Args:
        request: What was estimated.
        outcome: Estimate of the layers.
    """
    if outcome.storage is not None:
        return _by_kind(outcome.storage)
    swapped = (outcome.alpha or 0.0) if request.swaps else 0.0
    kept = 1.0 - swapped - outcome.recomputed
    fractions = (
        f"{_percent(swapped)} of tokens have their activations swapped, {_percent(outcome.recomputed)} recomputed, "
        f"{_percent(kept)} kept on the device."
    )
    if outcome.recomputed + swapped == 0 or outcome.runs_again:
        return fractions
    if request.swaps:
        return f"{fractions} Layer inputs and attention outputs are swapped for every token."
    what = "Layer inputs and attention outputs" if request.keeps_attention else "Layer inputs"
    return f"{fractions} {what} are kept on the device for every token."


def _by_kind(storage: Storage) -> str:
    """Each kind of tensor with the shares of its tokens; equal ones together. Adapters' are too small to matter."""
    alike: dict[str, list[str]] = {}
    for kind, shares in storage.items():
        places = [f"{_percent(share)} {_PLACES[place]}" for place, share in shares.items() if share >= _LEAST]
        name = _KINDS.get(kind, kind.rpartition(".")[2])
        if ".lora_" not in kind and places:
            alike.setdefault(", ".join(places), []).append(name)
    parts = [f"{_listed(names)} {places}" for places, names in alike.items()]
    return f"By kind of tensor, in shares of the tokens: {'; '.join(parts)}."


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
