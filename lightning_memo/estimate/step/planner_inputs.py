"""Inputs of the planner: costs of the layer calls of one sequence on one device, and the memory budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.estimate.inputs.cluster import DISK
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.memory.activations import LayerActivations, layer_activations
from lightning_memo.estimate.memory.layer_buffers import has_known_buffers
from lightning_memo.estimate.memory.sliced_working_set import SlicedStep
from lightning_memo.estimate.memory.working_set import HuggingFaceStep
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import METHOD_TRAITS, element_bytes, layer_kernels, runs_here
from lightning_memo.estimate.step.device_bytes import (
    backward_bytes,
    device_state_bytes,
    gathered_bytes,
    logits_bytes,
    loss_bytes,
)
from lightning_memo.estimate.step.waiting_gradients import waiting_bytes
from lightning_memo.estimate.times.layer_times import has_whole_logits, layer_times, memory_rate
from lightning_memo.estimate.times.outside_times import outside_seconds
from lightning_memo.estimate.times.streamed_times import streamed_seconds
from lightning_memo.parallel.pipeline.stage_order import most_in_flight


def estimated_layer_costs(question: Question, parallel: Parallelism) -> LayerCosts:
    """Compute the costs of the layers of one pipeline stage for one sequence."""
    tokens = question.seq_len // (parallel.tp * parallel.cp)
    bandwidth = question.cluster.host_bandwidth_of(devices_per_host(question)) * question.constants.host_efficiency
    runs = [_costs_of_run(each, parallel, bandwidth) for each in question.runs(parallel)]
    of_calls: dict[str, Any] = {name: sum((run[name] for run in runs), ()) for name in runs[0]}
    alive = tokens if question.sliced is None else question.sliced.tokens
    others = max(run["other_bytes"][0] for run in runs)
    transient, in_backward = _transients(question, parallel, alive * (others // tokens))
    if runs_here(question):  # a stage keeps its input and its output for each micro-batch in flight
        inputs = max(run["input_bytes"][0] for run in runs)
        transient += 2 * inputs * (sequences_in_flight(question, parallel) - 1)
        in_backward += 2 * inputs * (sequences_in_flight(question, parallel) - 1)
    if question.swap_precision != "exact":
        in_backward += alive * restored_bytes_per_token(question, parallel)
    # All devices of a node share its disk.
    write, read = (getattr(question.cluster, name) or 0.0 for name in DISK) if question.spill_bytes else (0.0, 0.0)
    return LayerCosts(
        batch=1,
        tokens=tokens,
        **of_calls,
        outside_seconds=outside_seconds(question, parallel),
        offload_bytes_per_second=bandwidth,
        prefetch_bytes_per_second=bandwidth,
        fixed_device_bytes=_fixed_bytes(question, parallel),
        transient_device_bytes=transient,
        backward_device_bytes=in_backward,
        spill_write_bytes_per_second=write / devices_per_host(question),
        spill_read_bytes_per_second=read / devices_per_host(question),
    )


def _fixed_bytes(question: Question, parallel: Parallelism) -> int:
    """Bytes that every plan needs."""
    always = device_state_bytes(question, parallel).total + gathered_bytes(question, parallel)
    return round(always) + waiting_bytes(question, parallel)


def _costs_of_run(question: Question, parallel: Parallelism, bandwidth: float) -> dict[str, tuple[Any, ...]]:
    """Bytes and seconds of equal layers, by field of `LayerCosts`."""
    calls = question.shape.layers
    tokens = question.seq_len // (parallel.tp * parallel.cp)
    kept = _kept(question, parallel)
    if question.sliced is not None:
        kept = replace(
            kept, others=kept.others + question.sliced.kept_tables_bytes(question.shape, element_bytes(question))
        )
    times = layer_times(question, parallel)
    forward, backward = times.forward, times.backward
    if question.sliced is not None:
        forward, backward = streamed_seconds(question, question.sliced, times, kept, bandwidth)
    if METHOD_TRAITS[question.method].recomputes == "alpha" and runs_here(question):
        forward += 2 * tokens * (kept.input + kept.attention) / memory_rate(question)  # copied into a slot
    return _compression(question, kept, tokens, calls) | {
        "input_bytes": (tokens * kept.input,) * calls,
        "attention_bytes": (tokens * kept.attention,) * calls,
        "other_bytes": (tokens * kept.others,) * calls,
        "forward_seconds": (forward,) * calls,
        "backward_seconds": (backward,) * calls,
        "recompute_seconds": (times.recompute,) * calls,
    }


def _kept(question: Question, parallel: Parallelism) -> LayerActivations:
    """Bytes per token that a layer saves."""
    return layer_activations(
        question.shape,
        kernels=layer_kernels(question),
        sizes=element_bytes(question),
        tensor_parallel=parallel.tp,
    )


def _compression(question: Question, kept: LayerActivations, tokens: int, calls: int) -> dict[str, tuple[Any, ...]]:
    """Bytes and seconds of compression by field of `LayerCosts`; nothing if activations are swapped as they are.

    A tensor is read for the scales and for the values. It is written twice when it is restored, and read in between.
    """
    if question.swap_precision == "exact":
        return {}
    compress, restore = 2 * kept.compressible + kept.compressed, 3 * kept.compressible + kept.compressed
    return {
        "swapped_other_bytes": (tokens * (kept.others - kept.compressible + kept.compressed),) * calls,
        "compress_seconds": (tokens * compress / memory_rate(question),) * calls,
        "restore_seconds": (tokens * restore / memory_rate(question),) * calls,
    }


def restored_bytes_per_token(question: Question, parallel: Parallelism) -> int:
    """Bytes per token of the tensors that are restored at once, in the layer with most of them."""
    return max(_kept(run, parallel).restored for run in question.runs(parallel))


def largest_slot(costs: LayerCosts, alpha: float) -> int:
    """Return the most bytes that a layer call swaps."""
    return max(costs.swapped_bytes(call, alpha) for call in range(costs.calls))


def _transients(question: Question, parallel: Parallelism, recomputed_bytes: int) -> tuple[int, int]:
    """Peaks of transient memory outside the backward of layers, and inside it without recomputed activations."""
    if not has_known_step(question):
        outside = round(logits_bytes(question, parallel) + loss_bytes(question, parallel))
        return outside, max(backward_bytes(run, parallel) for run in question.runs(parallel))
    step = known_step(question, parallel)
    return step.outside_bytes, max(step.layers_bytes - recomputed_bytes, 0)


def has_known_step(question: Question) -> bool:
    """Whether the buffers of a step are known one by one."""
    return runs_here(question) and has_known_buffers(question.shape) and not has_whole_logits(question)


def known_step(question: Question, parallel: Parallelism) -> HuggingFaceStep:
    """Return the buffers of a step whose layers are recomputed, see `has_known_step`."""
    ranks, sequences = parallel.dp * parallel.cp, question.batch_size // parallel.dp
    stays, shards = ranks > 1 or sequences > 1, ranks if parallel.zero_stage else 1
    if question.sliced is not None:
        return SlicedStep(
            shape=question.shape,
            sizes=element_bytes(question),
            tokens=question.seq_len,
            gradients_stay=stays,
            optimizer_shards=shards,
            slices=question.sliced,
        )
    return HuggingFaceStep(
        shape=replace(question.shape, layers=question.shape.layers // parallel.pp),
        sizes=element_bytes(question),
        tokens=question.seq_len // (parallel.tp * parallel.cp),
        tensor_parallel=parallel.tp,
        ring=parallel.cp > 1,
        gradients_stay=stays,
        optimizer_shards=shards,
    )


def device_budget(question: Question, parallel: Parallelism) -> Budget:
    """Return the memory that one device may use for one sequence. Sequences in a pipeline share the host memory."""
    cluster, constants = question.cluster, question.constants
    return Budget(
        device_bytes=int(cluster.device_bytes * constants.device_share),
        host_bytes=int(
            cluster.host_bytes
            * constants.host_share
            / devices_per_host(question)
            / sequences_in_flight(question, parallel)
        ),
        spill_bytes=question.spill_bytes // devices_per_host(question),
    )


def devices_per_host(question: Question) -> int:
    """Number of devices that share a host."""
    return min(question.gpus, question.cluster.devices_per_node)


def sequences_in_flight(question: Question, parallel: Parallelism) -> int:
    """Number of sequences for whose activations a pipeline stage has room, with blocks of layers rounded up."""
    if not runs_here(question):
        return min(parallel.pp, question.batch_size // parallel.dp)
    blocks = most_in_flight(question.stage, parallel.pp, parallel.virtual_pipeline_size)
    return -(-sum(blocks) // len(blocks))
