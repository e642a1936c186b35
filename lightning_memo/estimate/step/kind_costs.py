"""Costs of each kind of tensor, for plans that name a place for each of them."""

from __future__ import annotations

from typing import Final

from lightning_memo.artifacts.layer_costs import LayerCosts
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.storage_plan import CallPlan
from lightning_memo.artifacts.tensor_kind_costs import (
    ALL,
    ATTENTION,
    INPUT,
    PLACES,
    CallCosts,
    Product,
    StorageCosts,
)
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.memory.slice_settings import saved_bytes
from lightning_memo.estimate.request.estimate_request import Question, Storage
from lightning_memo.estimate.request.training_methods import element_bytes, layer_kernels
from lightning_memo.estimate.times.layer_products import layer_products
from lightning_memo.estimate.times.layer_times import layer_times, memory_rate
from lightning_memo.estimate.times.memory_bound import layer_traffic
from lightning_memo.planner.storage.storage_needs import recompute_seconds
from lightning_memo.planner.token_slices import SavedBytes

_KERNEL_SECONDS: Final = 3e-6
"""Time of a kernel in addition to its operations. Without it, products with inputs of equal width would be equally good
to store, per byte, and a plan would choose arbitrarily among them."""


def estimated_storage_costs(question: Question, parallel: Parallelism, costs: LayerCosts) -> StorageCosts:
    """Compute what a first step measures for each kind of tensor of a layer that runs on a process's tokens.

    Plans do not name products whose weights are divided over tensor-parallel processes.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        costs: Costs of the layers of the step.
    """
    calls: list[CallCosts] = []
    for run in question.runs(parallel):
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
            swapped_other_bytes=None if costs.swapped_other_bytes is None else costs.swapped_other_bytes[first],
            compress_seconds=0.0 if costs.compress_seconds is None else costs.compress_seconds[first],
            restore_seconds=0.0 if costs.restore_seconds is None else costs.restore_seconds[first],
        )
        calls += [call] * run.shape.layers
    return StorageCosts.of_step(calls, costs)


def recomputed_products(question: Question, tokens: int) -> tuple[Product, ...]:
    """Return the matrix products that a recomputation of some tokens computes, with the times of their kernels.

    The products of adapters take as long as their bytes; all others as long as their operations. The second product of
    an adapter is a part of the sum that a plan stores.
    """
    shape, sizes, kernels = question.shape, element_bytes(question), layer_kernels(question)
    rate = question.cluster.peak_flops * sizes.rate * question.constants.dense_efficiency
    moved = {group.name: group.forward for group in layer_traffic(shape, kernels=kernels, sizes=sizes) if group.again}

    def moving_seconds(group: str) -> float:
        return tokens * moved[group] / memory_rate(question)

    products = []
    for product in layer_products(shape, kernels):
        adapters = product.adapters(shape)
        if adapters:
            first, width = adapters[0]
            seconds = _KERNEL_SECONDS + moving_seconds(first)
            products.append(Product(name=first, size_bytes=tokens * sizes.product * width, seconds=seconds))
        if not product.recomputed_name:
            continue
        seconds = _KERNEL_SECONDS + 2 * tokens * product.inputs * product.outputs / rate
        if adapters:
            seconds += _KERNEL_SECONDS + moving_seconds(adapters[1][0]) + moving_seconds(product.sum_name)
        size_bytes = tokens * sizes.product * product.outputs
        products.append(Product(name=product.recomputed_name, size_bytes=size_bytes, seconds=seconds))
    return tuple(products)


def recomputed_work(question: Question, parallel: Parallelism, plan: Plan) -> tuple[float, float]:
    """Return the FLOPs of all layers' recomputation by a plan on all processes, and its seconds.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        plan: Plan that names kinds of tensors.
    """
    storage, costs = plan.swap.storage, plan.storage_costs
    assert storage is not None and costs is not None
    flops = seconds = 0.0
    first = 0
    for run in question.runs(parallel):
        number = costs.call_classes[first]
        call, stored, layers = costs.classes[number], storage.calls[number], run.shape.layers
        flops += layers * _recomputed_flops(run, stored, costs.tokens)
        seconds += layers * recompute_seconds(call, stored, costs.tokens)
        first += layers
    return flops, seconds


def _recomputed_flops(question: Question, stored: CallPlan, tokens: int) -> float:
    """FLOPs of the recomputation of a layer, without those of adapters. Those of experts have no name in a plan."""
    shape, processes = question.shape, question.seq_len // tokens
    whole = stored.tokens(ALL)
    flops = shape.attention_flops(processes * (tokens - stored.tokens(ATTENTION)))
    if shape.experts > 1:
        flops += 2.0 * shape.active_experts * shape.ffn_parameters * processes * (tokens - whole)
    for product in layer_products(shape, layer_kernels(question)):
        if name := product.recomputed_name:
            again = tokens - whole - stored.tokens(name)
            flops += 2.0 * product.inputs * product.outputs * processes * again
    return flops


def shares_by_place(plan: Plan) -> Storage:
    """Return what becomes of each kind of tensor, in shares of the tokens of all layer calls that have it."""
    storage, costs = plan.swap.storage, plan.storage_costs
    assert storage is not None and costs is not None
    places = PLACES if plan.swap.spill_bytes else PLACES[:2]
    shares: Storage = {}
    calls = dict.fromkeys((kind for call in costs.classes for kind in call.kinds), 0)
    for call, stored, count in zip(costs.classes, storage.calls, costs.class_calls, strict=True):
        for kind in call.kinds:
            own: dict[str, float] = {place: stored.tokens(kind, place) / costs.tokens for place in places}
            product = kind not in (INPUT, ATTENTION, ALL)
            with_others = stored.tokens(ALL) / costs.tokens if product else 0.0
            own["recompute"] = 1.0 - sum(own.values()) - with_others
            calls[kind] += count
            sums = shares.setdefault(kind, dict.fromkeys(own, 0.0))
            shares[kind] = {place: sums[place] + count * share for place, share in own.items()}
    return {kind: {place: share / calls[kind] for place, share in sums.items()} for kind, sums in shares.items()}


def storable_tensors(
    question: Question, products: tuple[Product, ...], tokens: int, tensor_parallel: int = 1
) -> list[SavedBytes]:
    """Return the tensors of a layer call on some tokens that a plan may store, outputs of its products included."""
    saved = saved_bytes(
        question.shape,
        kernels=layer_kernels(question),
        sizes=element_bytes(question),
        tokens=tokens,
        tensor_parallel=tensor_parallel,
        swap_precision=question.swap_precision,
    )
    return [*saved, *(SavedBytes(product.name, product.size_bytes) for product in products)]
