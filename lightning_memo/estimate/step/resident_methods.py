"""Training methods that keep or recompute activations, and FPDT, whose activations are on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_memo.artifacts.layer_costs import LayerCosts
from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import FP32
from lightning_memo.estimate.memory.planned_step import PlannedCall, PlannedSlice, PlannedStep
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import METHOD_TRAITS
from lightning_memo.estimate.step.device_bytes import gathered_bytes, logits_bytes
from lightning_memo.estimate.step.layers_estimate import LayersEstimate
from lightning_memo.estimate.step.plan_bytes import all_but_input
from lightning_memo.estimate.step.planner_inputs import (
    device_budget,
    estimated_layer_costs,
    has_known_step,
    known_step,
    sequences_in_flight,
)
from lightning_memo.estimate.times.layer_times import layer_times
from lightning_memo.planner.alpha.step_time import step_seconds
from lightning_memo.utils.units import format_bytes

FPDT_HIDDEN_STATES: Final = 8
"""Number of hidden-state tensors of all tokens that FPDT holds on a device: a layer's input, output, attention output
and residual, and their gradients."""

FPDT_CHUNK_TOKENS: Final = 65536
"""Tokens of the sequence in a chunk of FPDT (section 5.1 of its paper)."""

FPDT_CHUNK_HIDDEN_STATES: Final = 20
"""Number of hidden-state tensors of a chunk: queries, keys, values and output with their gradients (8), their copies
sent between devices (8), and those of the next chunk copied from the host (4)."""

ZERO_BUFFER_BYTES: Final = 4_000_000_000
"""DeepSpeed's default limits for ZeRO 3 in bf16: 1e9 gathered weights, and two reduction buckets of 5e8."""

SEQUENCE_PARALLEL_LOSS_BYTES: Final = 2 * FP32
"""Additional bytes per logit: Megatron-DeepSpeed's loss of a divided sequence does not work in place, but allocates the
softmax and its logarithm."""


def estimate_resident(question: Question, parallel: Parallelism) -> LayersEstimate:
    """Estimate a method that copies nothing to the host."""
    traits = METHOD_TRAITS[question.method]
    costs = estimated_layer_costs(question, parallel)
    if traits.recomputes == "all" and has_known_step(question) and parallel.pp == 1:
        return _outcome(question, parallel, costs, _checkpointed_bytes(question, parallel, costs), 0)
    kept = costs.input_bytes[0] if traits.recomputes == "all" else costs.skeletal_bytes // costs.calls
    activations = kept * costs.calls
    recomputed_bytes = (
        max(map(sum, zip(costs.attention_bytes, costs.other_bytes, strict=True))) if traits.recomputes == "all" else 0
    )
    in_backward = costs.backward_device_bytes + recomputed_bytes
    first_stage = activations * sequences_in_flight(question, parallel) + in_backward
    at_loss = costs.transient_device_bytes + _loss_bytes(question, parallel)
    last_stage = activations + max(in_backward, at_loss)
    requested = max(first_stage, activations + in_backward + at_loss)
    logits = round(logits_bytes(question, parallel)) if at_loss > in_backward else 0
    if first_stage > last_stage:
        activations, logits = first_stage - in_backward, 0
    alive = max(first_stage, last_stage)
    device_bytes = {
        "activations": activations,
        "transients": alive - activations - logits,
        "logits": logits,
        "gathered": round(gathered_bytes(question, parallel)),
    }
    reorganised = _reorganisation_seconds(question, parallel, costs, alive, requested)
    return _outcome(question, parallel, costs, device_bytes, 0, reorganised)


def estimate_fpdt(question: Question, parallel: Parallelism) -> LayersEstimate:
    """Estimate FPDT, which keeps layer inputs and the keys and values of inactive chunks on the host."""
    costs = estimated_layer_costs(question, parallel)
    hidden_states = costs.input_bytes[0]
    chunk = hidden_states * min(FPDT_CHUNK_TOKENS / question.seq_len, 1.0)
    device_bytes = {
        "activations": FPDT_HIDDEN_STATES * hidden_states,
        "transients": round(FPDT_CHUNK_HIDDEN_STATES * chunk) + (ZERO_BUFFER_BYTES if parallel.zero_stage == 3 else 0),
        "logits": round(logits_bytes(question, parallel)),
        "gathered": round(gathered_bytes(question, parallel)),
    }
    return _outcome(question, parallel, costs, device_bytes, costs.calls * hidden_states)


def _checkpointed_bytes(question: Question, parallel: Parallelism, costs: LayerCosts) -> dict[str, int]:
    """Bytes of a step that keeps layer inputs, and computes each layer again."""
    kept = costs.input_bytes[0]
    call = PlannedCall(slices=(PlannedSlice(tokens=costs.tokens, made=all_but_input(question)),), kept_bytes=kept)
    step = PlannedStep(step=known_step(question, parallel), calls=[call] * costs.calls, checkpointed=True)
    activations = costs.calls * kept
    return {
        "activations": activations,
        "transients": step.peak_bytes - activations,
        "logits": 0,
        "gathered": round(gathered_bytes(question, parallel)),
    }


def _loss_bytes(question: Question, parallel: Parallelism) -> int:
    """Additional bytes of a loss that is not computed in place."""
    if not METHOD_TRAITS[question.method].ulysses or parallel.cp == 1:
        return 0
    return SEQUENCE_PARALLEL_LOSS_BYTES * question.seq_len // parallel.cp * question.shape.vocab


def _reorganisation_seconds(
    question: Question, parallel: Parallelism, costs: LayerCosts, alive: int, requested: int
) -> float:
    """Time per sequence that the allocator of the paper's Megatron-LM spends on reorganizing memory.

    The time of other programs is not known; DeepSpeed's measured times show none.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        costs: Costs of the layers.
        alive: Peak of live bytes.
        requested: Bytes of the loss and of a layer's backward together, which cannot use the same cached segments.
    """
    constants = question.constants
    free = device_budget(question, parallel).device_bytes - costs.fixed_device_bytes
    known = constants.published and question.method == "megatron"
    if not known or not alive < free < constants.cache_growth * requested:
        return 0.0
    # As with a garbage collector, fuller memory is reorganized more often.
    often = 1 / (1 - alive / free)
    return often * costs.skeletal_bytes / constants.reorganised_bytes_per_second


def _outcome(
    question: Question,
    parallel: Parallelism,
    costs: LayerCosts,
    device_bytes: dict[str, int],
    host_bytes: int,
    reorganised: float = 0.0,
) -> LayersEstimate:
    room, limits = device_budget(question, parallel), []
    if not METHOD_TRAITS[question.method].planned and host_bytes == 0:
        device_bytes["fragmentation"] = round(question.constants.fragmentation * sum(device_bytes.values()))
    if reorganised:
        limits.append(f"Memory is not planned: its reorganization takes {reorganised:.3g} s per sequence.")
    if host_bytes > room.host_bytes:
        limits.append(
            f"{format_bytes(host_bytes)} of host memory are needed per device, but "
            f"{format_bytes(room.host_bytes)} are usable."
        )
    recomputes = METHOD_TRAITS[question.method].recomputes == "all"
    tokens = question.seq_len
    flops = sum(
        part.layers * (2.0 * tokens * part.multiplied_in_a_layer + part.attention_flops(tokens))
        for part in question.shape.runs
    )
    return LayersEstimate(
        status="oohm" if host_bytes > room.host_bytes else "ok",
        alpha=None,
        seconds=_seconds(question, parallel, costs) + reorganised,
        recomputed=float(recomputes),
        recomputed_flops=flops if recomputes else 0.0,
        recompute_seconds=sum(_recompute_seconds(question, parallel)) if recomputes else 0.0,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        limits=limits,
    )


def _seconds(question: Question, parallel: Parallelism, costs: LayerCosts) -> float:
    """Time of the layers and the head without any copies."""
    nothing, recomputes = (0,) * costs.calls, METHOD_TRAITS[question.method].recomputes == "all"
    computing = replace(
        costs,
        input_bytes=nothing,
        attention_bytes=nothing,
        other_bytes=nothing,
        recompute_seconds=_recompute_seconds(question, parallel) if recomputes else (0.0,) * costs.calls,
    )
    alone = SwapPlan(mode="memo", alpha=0.0, schedule="layer", slice_tokens=None, calls=costs.calls, slot_bytes=0)
    return step_seconds(computing, alone)


def _recompute_seconds(question: Question, parallel: Parallelism) -> tuple[float, ...]:
    """Time to compute each layer of a pipeline stage again."""
    runs = ((run.shape.layers, layer_times(run, parallel).recompute_all) for run in question.runs(parallel))
    return sum(((seconds,) * layers for layers, seconds in runs), ())
