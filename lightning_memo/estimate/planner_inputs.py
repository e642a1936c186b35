"""Inputs of the planner: costs of the layer calls of one sequence on one device and of each kind of tensor; budgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Final

from lightning_memo.artifacts.costs import (
    ATTENTION,
    OTHER,
    PLACES,
    Budget,
    CallCosts,
    LayerCosts,
    Product,
    StorageCosts,
    is_product,
)
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import CallPlan
from lightning_memo.estimate.cluster import DISK
from lightning_memo.estimate.device_bytes import (
    backward_bytes,
    device_state_bytes,
    gathered_bytes,
    logits_bytes,
    loss_bytes,
    waiting_bytes,
)
from lightning_memo.estimate.layer_buffers import has_known_buffers
from lightning_memo.estimate.layer_operations import layer_products, layer_traffic
from lightning_memo.estimate.request import EstimateRequest, Parallelism, Storage
from lightning_memo.estimate.saved_tensors import LayerActivations, layer_activations
from lightning_memo.estimate.slice_settings import saved_bytes
from lightning_memo.estimate.step_buffers import HuggingFaceStep, SlicedStep
from lightning_memo.estimate.step_times import layer_times, memory_rate, outside_seconds, streamed_seconds
from lightning_memo.parallel.pipeline.stage_order import most_in_flight
from lightning_memo.planner.step_time import recompute_seconds
from lightning_memo.planner.token_slices import SavedBytes

_KERNEL_SECONDS: Final = 3e-6
"""Time of a kernel in addition to its operations. Without it, products with inputs of equal width would be equally good
to store, per byte, and a plan would choose arbitrarily among them."""


def estimated_layer_costs(request: EstimateRequest, parallel: Parallelism) -> LayerCosts:
    """Compute the costs of the layers of one pipeline stage for one sequence."""
    tokens = request.seq_len // (parallel.tp * parallel.cp)
    bandwidth = request.cluster.host_bandwidth_of(devices_per_host(request)) * request.constants.host_efficiency
    runs = [_costs_of_run(each, parallel, bandwidth) for each in request.runs(parallel)]
    of_calls: dict[str, Any] = {name: sum((run[name] for run in runs), ()) for name in runs[0]}
    slices = request.sliced(tokens)
    alive = tokens if slices is None else slices.tokens
    others = max(run["other_bytes"][0] for run in runs)
    transient, in_backward = _transients(request, parallel, alive * (others // tokens))
    # A stage of a pipeline keeps its input and its output for each micro-batch in flight.
    waiting = 2 * max(run["input_bytes"][0] for run in runs) * (sequences_in_flight(request, parallel) - 1)
    transient, in_backward = transient + waiting, in_backward + waiting
    # All devices of a node share its disk.
    write, read = (getattr(request.cluster, name) or 0.0 for name in DISK) if request.disk_bytes else (0.0, 0.0)
    return LayerCosts(
        batch=1,
        tokens=tokens,
        **of_calls,
        outside_seconds=outside_seconds(request, parallel),
        offload_bytes_per_second=bandwidth,
        prefetch_bytes_per_second=bandwidth,
        fixed_device_bytes=_fixed_bytes(request, parallel),
        transient_device_bytes=transient,
        backward_device_bytes=in_backward,
        disk_write_bytes_per_second=write / devices_per_host(request),
        disk_read_bytes_per_second=read / devices_per_host(request),
    )


def _fixed_bytes(request: EstimateRequest, parallel: Parallelism) -> int:
    """Bytes that every plan needs."""
    always = device_state_bytes(request, parallel).total + gathered_bytes(request, parallel)
    return round(always) + waiting_bytes(request, parallel)


def _costs_of_run(request: EstimateRequest, parallel: Parallelism, bandwidth: float) -> dict[str, tuple[Any, ...]]:
    """Bytes and seconds of equal layers, by field of `LayerCosts`."""
    calls = request.shape.layers
    tokens = request.seq_len // (parallel.tp * parallel.cp)
    kept, slices = _kept(request, parallel), request.sliced(tokens)
    times = layer_times(request, parallel)
    forward, backward = times.forward, times.backward
    if slices is not None:
        kept = replace(kept, others=kept.others + slices.kept_tables_bytes(request.shape, request.element_bytes))
        forward, backward = streamed_seconds(request, slices, tokens, times, kept, bandwidth)
    if request.swaps:
        forward += 2 * tokens * (kept.input + kept.attention) / memory_rate(request)  # copied into a slot
    return {
        "input_bytes": (tokens * kept.input,) * calls,
        "attention_bytes": (tokens * kept.attention,) * calls,
        "other_bytes": (tokens * kept.others,) * calls,
        "forward_seconds": (forward,) * calls,
        "backward_seconds": (backward,) * calls,
        "recompute_seconds": (times.recompute,) * calls,
    }


def _kept(request: EstimateRequest, parallel: Parallelism) -> LayerActivations:
    """Bytes per token that a layer saves."""
    return layer_activations(
        request.shape,
        sizes=request.element_bytes,
        tensor_parallel=parallel.tp,
    )


def largest_slot(costs: LayerCosts, alpha: float) -> int:
    """Return the most bytes that a layer call swaps."""
    return max(costs.swapped_bytes(call, alpha) for call in range(costs.calls))


def _transients(request: EstimateRequest, parallel: Parallelism, recomputed_bytes: int) -> tuple[int, int]:
    """Peaks of transient memory outside the backward of layers, and inside it without recomputed activations."""
    if not has_known_step(request):
        outside = round(logits_bytes(request, parallel) + loss_bytes(request, parallel))
        sizes, parts = request.element_bytes, (run.shape for run in request.runs(parallel))
        return outside, max(backward_bytes(part, sizes, request.seq_len, parallel) for part in parts)
    step = known_step(request, parallel)
    return step.outside_bytes, max(step.layers_bytes - recomputed_bytes, 0)


def has_known_step(request: EstimateRequest) -> bool:
    """Whether the buffers of a step are known one by one."""
    return has_known_buffers(request.shape) and not request.has_whole_logits


def known_step(request: EstimateRequest, parallel: Parallelism) -> HuggingFaceStep:
    """Return the buffers of a step whose layers are recomputed, see `has_known_step`."""
    ranks, sequences = parallel.dp * parallel.cp, request.batch_size // parallel.dp
    stays, shards = ranks > 1 or sequences > 1, ranks if parallel.zero_stage else 1
    tokens = request.seq_len // (parallel.tp * parallel.cp)
    slices = request.sliced(tokens)
    if slices is not None:
        return SlicedStep(
            shape=request.shape,
            sizes=request.element_bytes,
            tokens=tokens,
            ring=parallel.cp > 1,
            gradients_stay=stays,
            optimizer_shards=shards,
            slices=slices,
        )
    return HuggingFaceStep(
        shape=replace(request.shape, layers=request.shape.layers // parallel.pp),
        sizes=request.element_bytes,
        tokens=tokens,
        tensor_parallel=parallel.tp,
        ring=parallel.cp > 1,
        gradients_stay=stays,
        optimizer_shards=shards,
    )


def device_budget(request: EstimateRequest, parallel: Parallelism) -> Budget:
    """Return the memory that one device may use for one sequence. Sequences in a pipeline share the host memory."""
    cluster, constants = request.cluster, request.constants
    return Budget(
        device_bytes=int(cluster.device_bytes * constants.device_share),
        host_bytes=int(
            cluster.host_bytes
            * constants.host_share
            / devices_per_host(request)
            / sequences_in_flight(request, parallel)
        ),
        disk_bytes=request.disk_bytes // devices_per_host(request),
    )


def devices_per_host(request: EstimateRequest) -> int:
    """Number of devices that share a host."""
    return min(request.gpus, request.cluster.devices_per_node)


def sequences_in_flight(request: EstimateRequest, parallel: Parallelism) -> int:
    """Number of sequences for whose activations a pipeline stage has room, with blocks of layers rounded up."""
    blocks = most_in_flight(request.stage, parallel.pp, parallel.virtual_pipeline_size)
    return -(-sum(blocks) // len(blocks))


def estimated_storage_costs(request: EstimateRequest, parallel: Parallelism, costs: LayerCosts) -> StorageCosts:
    """Compute what a first step measures for each kind of tensor of a layer that runs on a process's tokens.

    Plans do not name products whose weights are divided over tensor-parallel processes.

    Args:
        request: Training to estimate.
        parallel: Sizes of the parallelism.
        costs: Costs of the layers of the step.
    """
    calls: list[CallCosts] = []
    for run in request.runs(parallel):
        times = layer_times(run, parallel)
        products = recomputed_products(run, costs.tokens) if parallel.tp == 1 else ()
        first = len(calls)
        call = CallCosts(
            input_bytes=costs.input_bytes[first],
            attention_bytes=costs.attention_bytes[first],
            other_bytes=costs.other_bytes[first],
            products=products,
            forward_seconds=costs.forward_seconds[first],
            backward_seconds=costs.backward_seconds[first],
            attention_seconds=times.attention_forward,
            elementwise_seconds=max(times.recompute - sum(product.seconds for product in products), 0.0),
            window_tokens=run.shape.window,
        )
        calls += [call] * run.shape.layers
    return StorageCosts.of_step(calls, costs)


def recomputed_products(request: EstimateRequest, tokens: int) -> tuple[Product, ...]:
    """Return the matrix products that a recomputation of some tokens computes, with the times of their kernels.

    The products of adapters take as long as their bytes; all others as long as their operations. If adapters are fused,
    the second product is a part of the one that it adds to, and the first one is not stored.
    """
    shape, sizes = request.shape, request.element_bytes
    rate = request.product_flops * request.constants.dense_efficiency
    moved = {group.name: group.forward for group in layer_traffic(shape, sizes=sizes)}
    products: list[Product] = []

    def add(name: str, width: int, seconds: float) -> None:
        products.append(Product(name=name, size_bytes=tokens * sizes.product * width, seconds=seconds))

    def moving_seconds(group: str) -> float:
        return _KERNEL_SECONDS + tokens * moved[group] / memory_rate(request)

    for product in layer_products(shape):
        first, second = product.adapter_names
        multiplying = _KERNEL_SECONDS + 2 * tokens * product.inputs * product.outputs / rate
        adapters = shape.adapters if shape.adapts(product.role) else None
        if adapters is not None and not shape.fused_adapters:
            add(first, adapters.rank, moving_seconds(first))
            if not product.last:
                add(second, product.outputs, moving_seconds(second))
        elif adapters is not None:
            multiplying += moving_seconds(second)
        if name := product.recomputed_name(shape):
            add(name, product.outputs, multiplying)
    return tuple(products)


def recomputed_work(request: EstimateRequest, parallel: Parallelism, plan: Plan) -> tuple[float, float]:
    """Return the FLOPs of all layers' recomputation by a plan on all processes, and its seconds.

    Args:
        request: Training to estimate.
        parallel: Sizes of the parallelism.
        plan: Plan that names kinds of tensors.
    """
    storage, costs = plan.swap.storage, plan.storage_costs
    assert costs is not None
    flops = seconds = 0.0
    first = 0
    for run in request.runs(parallel):
        last = first + run.shape.layers
        for number, layers in Counter(costs.call_classes[first:last]).items():
            call, stored = costs.classes[number], storage.calls[number]
            flops += layers * _recomputed_flops(run, stored, costs.tokens)
            seconds += layers * recompute_seconds(call, stored, costs.tokens)
        first = last
    return flops, seconds


def _recomputed_flops(request: EstimateRequest, stored: CallPlan, tokens: int) -> float:
    """FLOPs of the recomputation of a layer, without those of adapters. Those of experts have no name in a plan."""
    shape, processes = request.shape, request.seq_len // tokens
    whole = stored.tokens(OTHER)
    flops = shape.attention_flops(processes * (tokens - stored.tokens(ATTENTION)))
    if shape.experts > 1:
        flops += 2.0 * shape.active_experts * shape.ffn_parameters * processes * (tokens - whole)
    for product in layer_products(shape):
        name = product.recomputed_name(shape)
        if name or shape.quantization is not None:
            again = tokens - whole - (stored.tokens(name) if name else 0)
            flops += 2.0 * product.inputs * product.outputs * processes * again
    return flops


def shares_by_place(plan: Plan) -> Storage:
    """Return what becomes of each kind of tensor, in shares of the tokens of all layer calls that have it."""
    storage, costs = plan.swap.storage, plan.storage_costs
    assert costs is not None
    places = PLACES if plan.swap.disk_bytes else PLACES[:2]
    shares: Storage = {}
    calls = dict.fromkeys((kind for call in costs.classes for kind in call.kinds), 0)
    for call, stored, count in zip(costs.classes, storage.calls, costs.class_calls, strict=True):
        for kind in call.kinds:
            own: dict[str, float] = {place: stored.tokens(kind, place) / costs.tokens for place in places}
            with_others = stored.tokens(OTHER) / costs.tokens if is_product(kind) else 0.0
            own["recompute"] = 1.0 - sum(own.values()) - with_others
            calls[kind] += count
            sums = shares.setdefault(kind, dict.fromkeys(own, 0.0))
            shares[kind] = {place: sums[place] + count * share for place, share in own.items()}
    return {kind: {place: share / calls[kind] for place, share in sums.items()} for kind, sums in shares.items()}


def storable_tensors(
    request: EstimateRequest, products: tuple[Product, ...], tokens: int, tensor_parallel: int = 1
) -> list[SavedBytes]:
    """Return the tensors of a layer call on some tokens that a plan may store, outputs of its products included."""
    saved = saved_bytes(
        request.shape,
        sizes=request.element_bytes,
        tokens=tokens,
        tensor_parallel=tensor_parallel,
    )
    return [*saved, *(SavedBytes(product.name, product.size_bytes) for product in products)]
