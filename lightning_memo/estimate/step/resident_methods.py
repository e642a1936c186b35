"""Methods that keep what they need on the device, or compute it again; and slices whose activations are on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_memo.artifacts.layer_costs import LayerCosts
from lightning_memo.artifacts.plan import SwapPlan
from lightning_memo.config import format_bytes
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.question import Question
from lightning_memo.estimate.request.training_methods import METHOD_TRAITS
from lightning_memo.estimate.step.device_bytes import gathered_bytes, logits_bytes
from lightning_memo.estimate.step.layer_times import FP32, layer_times
from lightning_memo.estimate.step.layers_estimate import LayersEstimate
from lightning_memo.estimate.step.planner_inputs import device_budget, estimated_layer_costs, sequences_in_flight
from lightning_memo.planner.alpha.step_time import step_seconds

STREAMED_UNITS: Final = 8
"""Hidden states of all of a device's tokens that FPDT has on it: a layer's input, output and attention output, what
the residual adds, and their gradients."""

STREAMED_CHUNK_TOKENS: Final = 65536
"""Of a sequence, in a chunk of FPDT (its section 5.1)."""

STREAMED_CHUNK_UNITS: Final = 20
"""Hidden states of a chunk: queries, keys, values and output with their gradients (8), their copies on the way
between devices (8), and the next chunk's on the way from the host (4)."""

ZERO_BUFFER_BYTES: Final = 4_000_000_000
"""DeepSpeed's defaults for ZeRO 3 in bf16: 1e9 gathered weights alive at most, and two reduction buckets of 5e8."""


SEQUENCE_PARALLEL_LOSS_BYTES: Final = 2 * FP32
"""Of a logit, beside those that all losses have: Megatron-DeepSpeed's loss of a divided sequence does not work in
place, but makes the softmax, and its logarithm."""


def estimate_resident(question: Question, parallel: Parallelism) -> LayersEstimate:
    """What a method takes by which nothing leaves the device."""
    traits = METHOD_TRAITS[question.method]
    costs = estimated_layer_costs(question, parallel)
    kept = costs.input_bytes[0] if traits.recomputes == "all" else costs.skeletal_bytes // costs.calls
    activations = kept * costs.calls
    recomputed_bytes = costs.attention_bytes[0] + costs.other_bytes[0] if traits.recomputes == "all" else 0
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
    """FPDT: layer inputs are on the host, and so are keys and values of chunks that are not computed with."""
    costs = estimated_layer_costs(question, parallel)
    unit = costs.input_bytes[0]
    chunk = unit * min(STREAMED_CHUNK_TOKENS / question.seq_len, 1.0)
    device_bytes = {
        "activations": STREAMED_UNITS * unit,
        "transients": round(STREAMED_CHUNK_UNITS * chunk) + (ZERO_BUFFER_BYTES if parallel.zero_stage == 3 else 0),
        "logits": round(logits_bytes(question, parallel)),
        "gathered": round(gathered_bytes(question, parallel)),
    }
    return _outcome(question, parallel, costs, device_bytes, costs.calls * unit)


def _loss_bytes(question: Question, parallel: Parallelism) -> int:
    """What a loss takes that is not computed in place."""
    if not METHOD_TRAITS[question.method].ulysses or parallel.cp == 1:
        return 0
    return SEQUENCE_PARALLEL_LOSS_BYTES * question.seq_len // parallel.cp * question.shape.vocab


def _reorganisation_seconds(
    question: Question, parallel: Parallelism, costs: LayerCosts, alive: int, requested: int
) -> float:
    """What the allocator of the paper's Megatron-LM loses for each sequence.

    What others lose is not known; DeepSpeed's times show nothing.

    Args:
        question: what is trained.
        parallel: how.
        costs: of its layers.
        alive: bytes at once, at most.
        requested: bytes of the loss and of a layer's backward together: memory cut for one does not serve the other.
    """
    constants = question.constants
    free = device_budget(question, parallel).device_bytes - costs.fixed_device_bytes
    known = constants.published and question.method == "megatron"
    if not known or not alive < free < constants.cache_growth * requested:
        return 0.0
    # As with a garbage collector: the fuller the memory, the more often.
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
        limits.append(f"Memory is not planned: its reorganisation takes {reorganised:.3g} s for each sequence.")
    if host_bytes > room.host_bytes:
        limits.append(
            f"The host would hold {format_bytes(host_bytes)} for each device, and has {format_bytes(room.host_bytes)}."
        )
    return LayersEstimate(
        status="oohm" if host_bytes > room.host_bytes else "ok",
        alpha=None,
        seconds=_seconds(question, parallel, costs) + reorganised,
        recomputed=float(METHOD_TRAITS[question.method].recomputes == "all"),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        limits=limits,
    )


def _seconds(question: Question, parallel: Parallelism, costs: LayerCosts) -> float:
    """Nothing is copied, so that only the times count."""
    nothing = (0,) * costs.calls
    recompute = (
        layer_times(question, parallel).recompute_all if METHOD_TRAITS[question.method].recomputes == "all" else 0.0
    )
    computing = replace(
        costs,
        input_bytes=nothing,
        attention_bytes=nothing,
        other_bytes=nothing,
        recompute_seconds=(recompute,) * costs.calls,
    )
    alone = SwapPlan(mode="memo", alpha=0.0, schedule="layer", slice_tokens=None, calls=costs.calls, slot_bytes=0)
    return step_seconds(computing, alone)
