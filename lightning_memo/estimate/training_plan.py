"""The plan that training makes, from the planner that it calls, and the device memory of a plan by category."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from lightning_memo.artifacts.costs import OTHER, Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import PlanMemory, StoragePlan
from lightning_memo.estimate.device_bytes import gathered_bytes, logits_bytes
from lightning_memo.estimate.layer_operations import layer_products
from lightning_memo.estimate.planner_inputs import (
    estimated_storage_costs,
    has_known_step,
    known_step,
    largest_slot,
    sequences_in_flight,
    storable_tensors,
)
from lightning_memo.estimate.request import EstimateRequest, Parallelism
from lightning_memo.estimate.saved_tensors import FP32, saved_tensors
from lightning_memo.estimate.step_buffers import PlannedCall, PlannedSlice, PlannedStep
from lightning_memo.planner import Restrictions, make_plan
from lightning_memo.planner.explain_plan import price_reason
from lightning_memo.planner.make_plan import choose_plan, plain_plan, usable_device_bytes, with_spare_device
from lightning_memo.planner.storage_planner import StorageError
from lightning_memo.planner.streamed_bytes import StreamedBytes
from lightning_memo.planner.token_slices import (
    SavedBytes,
    TokenRange,
    memory_of_plan,
    memory_of_slots,
    plan_of_alpha,
    slices_of,
)

# The layer saves queries and keys behind their rotary positions.
_ROTATED: Final = ("query", "key")


def training_plan(request: EstimateRequest, parallel: Parallelism, costs: LayerCosts, room: Budget) -> Plan:
    """Make the plan that `MemoStrategy` would make with default settings, apart from those of the request.

    Args:
        request: Training to estimate.
        parallel: Sizes of the parallelism.
        costs: Costs of the layers of a step.
        room: Memory of a process.

    Raises:
        HostMemoryError: The host cannot hold the activations that have to be swapped.
    """
    budget = measured_budget(request, costs, room)
    by_kind = None
    if request.slices is None and wanted_alpha(request) == "auto":
        by_kind = _plan_by_kind(request, parallel, costs, budget)
    return choose_plan(
        by_kind,
        lambda: alpha_plan(request, parallel, costs, budget, wanted_alpha(request)),
        device_measured=True,
    )


def measured_budget(request: EstimateRequest, costs: LayerCosts, room: Budget) -> Budget:
    """Return the budget of a plan that is made after a first step, whose rounding buffers are then still allocated."""
    buffers, fixed = memory_at(request, costs, 0.0).buffer_bytes, costs.fixed_device_bytes
    return replace(room, device_bytes=usable_device_bytes(fixed, max(room.device_bytes - fixed - buffers, 0)))


def wanted_alpha(request: EstimateRequest) -> float | str:
    """Return the alpha of a request: "auto", unless it is given or all activations are swapped."""
    if request.method == "full_swap":
        return 1.0
    return "auto" if request.alpha is None else request.alpha


def alpha_plan(
    request: EstimateRequest, parallel: Parallelism, costs: LayerCosts, room: Budget, alpha: float | str
) -> Plan:
    """Make a plan with a single alpha (MEMO, section 4.2).

    Raises:
        HostMemoryError: The host cannot hold the activations that have to be swapped.
    """
    slices = request.sliced(costs.tokens)
    restrictions = Restrictions(
        alpha=alpha,
        slice_tokens=None if slices is None else slices.tokens,
        # A pipeline cannot keep the activations of all its sequences. With slices, the planner in training does not
        # know the memory of a step without slices.
        may_be_plain=parallel.pp == 1 and slices is None,
        stream_from_host="none" if slices is None else slices.stream_from_host,
        may_run_again=slices is not None and slices.states_on_host and parallel.pp == 1,
    )

    def sizes_of(plan: StoragePlan) -> PlanMemory | StreamedBytes:
        if slices is not None:
            return streamed_bytes(request, plan)
        return memory_of_slots(plan, partial(largest_slot, costs), costs.swapped_calls)

    return make_plan(costs, room, _fingerprint(request, parallel, costs), restrictions, sizes_of)


def _plan_by_kind(request: EstimateRequest, parallel: Parallelism, costs: LayerCosts, budget: Budget) -> Plan | None:
    """Plain training if that fits, otherwise the best plan by kinds of tensors; None if there is none.

    On a stage of a pipeline it is planned for all sequences in flight, none of which is trained plainly.
    """
    label = _fingerprint(request, parallel, costs)
    plain = plain_plan(costs, budget, label) if parallel.pp == 1 else None
    if plain is not None:
        return plain
    storage_costs = estimated_storage_costs(request, parallel, costs)
    tensors: list[list[SavedBytes]] = []
    for run in request.runs(parallel):
        products = storage_costs.classes[storage_costs.call_classes[len(tensors)]].products
        tensors += [storable_tensors(run, products, costs.tokens, parallel.tp)] * run.shape.layers
    room = with_spare_device(budget, costs)
    if parallel.pp > 1:
        count = sequences_in_flight(request, parallel)
        storage_costs, tensors = storage_costs.of_micro_batches(count), tensors * count
        room = replace(room, host_bytes=room.host_bytes * count)
    calls = [(saved, costs.tokens) for saved in tensors]
    restrictions = Restrictions(
        kinds=storage_costs,
        joint_attention=parallel.cp > 1,
        common_bounds=() if parallel.tp > 1 or parallel.cp > 1 else None,
        may_be_plain=False,
    )
    try:
        plan = make_plan(
            costs, room, label, restrictions, lambda plan: memory_of_plan(plan, calls, storage_costs.swapped_calls)
        )
    except StorageError:
        return None
    return plan if parallel.pp == 1 else _of_one_micro_batch(plan)


def _of_one_micro_batch(plan: Plan) -> Plan:
    """Return a plan for several micro-batches in flight as one of a single micro-batch.

    Its seconds and host bytes are those of one, and what stays on the device is that of all of them.

    Args:
        plan: Plan whose costs are those of one micro-batch.
    """
    swap, calls = plan.swap, plan.costs.calls
    assert swap.in_flight is not None
    count = swap.in_flight
    swap = replace(
        swap,
        storage=replace(swap.storage, call_classes=swap.storage.call_classes[:calls]),
        memory=replace(swap.memory, host=swap.memory.host // count, disk=swap.memory.disk[:calls]),
        in_flight=None,
    )
    prices = tuple(replace(price, seconds=price.seconds / count) for price in plan.prices)
    plan = replace(plan, swap=swap, step_seconds=plan.step_seconds / count, prices=prices)
    return replace(plan, reason=price_reason(plan))


def _fingerprint(request: EstimateRequest, parallel: Parallelism, costs: LayerCosts) -> Fingerprint:
    return Fingerprint(
        model=request.shape.name,
        batch=costs.batch,
        tokens=costs.tokens,
        precision=request.precision,
        device=request.cluster.device,
        torch="",
        parallel=str(parallel),
    )


def memory_at(request: EstimateRequest, costs: LayerCosts, alpha: float) -> PlanMemory:
    """Return the memory of a plan with one alpha."""
    slices = request.sliced(costs.tokens)
    plan = plan_of_alpha(costs.tokens, alpha, costs.calls, slice_tokens=None if slices is None else slices.tokens)
    if slices is not None:
        return streamed_bytes(request, plan).memory
    return memory_of_slots(plan, partial(largest_slot, costs), costs.swapped_calls)


def streamed_bytes(request: EstimateRequest, plan: StoragePlan) -> StreamedBytes:
    """Return the memory of a plan whose slices swap one by one."""
    slices = request.sliced(plan.tokens)
    assert slices is not None
    return slices.streamed_bytes(request.shape, sizes=request.element_bytes, plan=plan)


def bytes_of_plan(request: EstimateRequest, parallel: Parallelism, plan: Plan) -> dict[str, int]:
    """Return the bytes of a plan by category, without the model state.

    Where the buffers of a layer are known, their sum is the peak of a step. Otherwise it is what the planner expects,
    which is an upper bound.

    Args:
        request: Training to estimate.
        parallel: Sizes of the parallelism.
        plan: Plan of a training with this package, or of MEMO's.
    """
    swap = plan.swap
    kept = swap.memory.kept
    working = plan.working_set_bytes - swap.memory.buffer_bytes - kept
    if has_known_step(request) and request.sliced(plan.costs.tokens) is None:
        if swap.plain and request.shape.separate_norms and request.element_bytes.stream != FP32:
            kept -= sum(plan.costs.input_bytes)  # the layer's norm saves a copy in fp32 instead
        step = PlannedStep(
            step=known_step(request, parallel),
            calls=_planned_calls(request, parallel, plan, kept),
            buffer_bytes=swap.memory.buffer_bytes,
            plain=swap.plain,
        )
        working = step.peak_bytes - swap.memory.buffer_bytes - kept
    return by_category(request, parallel, swap.memory.buffer_bytes, kept, working, plan.costs.transient_device_bytes)


def by_category(
    request: EstimateRequest, parallel: Parallelism, buffers: int, kept: int, working: int, outside: int
) -> dict[str, int]:
    """Return the device memory by category. Logits count only if the peak is outside the layers.

    Args:
        request: Training to estimate.
        parallel: Sizes of the parallelism.
        buffers: Bytes of the rounding buffers.
        kept: Bytes of activations that stay on the device.
        working: All other bytes.
        outside: Bytes of the peak outside the layers.
    """
    logits = min(round(logits_bytes(request, parallel)), working) if working == outside else 0
    return {
        "rounding_buffers": buffers,
        "activations": kept,
        "transients": working - logits,
        "logits": logits,
        "gathered": round(gathered_bytes(request, parallel)),
    }


def all_but_input(request: EstimateRequest) -> frozenset[str]:
    """Return the names of all tensors that a layer saves, except its input."""
    return saved_names(request, "attention", "other")


def saved_names(request: EstimateRequest, *kinds: str) -> frozenset[str]:
    """Return the names of the tensors of some kinds that a layer saves."""
    tensors = saved_tensors(request.shape, sizes=request.element_bytes)
    return frozenset(tensor.name for tensor in tensors if tensor.kind in kinds)


def _planned_calls(request: EstimateRequest, parallel: Parallelism, plan: Plan, kept: int) -> list[PlannedCall]:
    """All layer calls, which keep `kept` bytes of activations on the device in total."""
    calls: list[PlannedCall] = []
    for run in request.runs(parallel):
        alike: dict[int, PlannedCall] = {}
        for number, of_class in enumerate(plan.swap.storage.call_classes[len(calls) :][: run.shape.layers], len(calls)):
            if of_class not in alike:
                slices, gradient = tuple(_planned_slices(run, plan, number)), run.shape.input_gradient
                alike[of_class] = PlannedCall(slices=slices, kept_bytes=0, input_gradient=gradient)
            calls.append(alike[of_class])
    shares = _kept_by_call(plan)
    return [replace(call, kept_bytes=round(kept * share)) for call, share in zip(calls, shares, strict=True)]


def _kept_by_call(plan: Plan) -> list[float]:
    """The share of each layer call in the bytes of activations that stay on the device."""
    costs, storage = plan.costs, plan.swap.storage
    kept = list(map(sum, zip(costs.attention_bytes, costs.other_bytes, strict=True)))
    if plan.storage_costs is not None:
        classes = zip(plan.storage_costs.classes, storage.calls, strict=True)
        of_class = [
            sum(size * stored.tokens(kind, "device") for kind, size in zip(call.kinds, call.sizes, strict=True))
            for call, stored in classes
        ]
        kept = [of_class[number] for number in storage.call_classes]
    return [each / max(sum(kept), 1) for each in kept]


def _planned_slices(run: EstimateRequest, plan: Plan, call: int) -> Iterator[PlannedSlice]:
    """The slices of a layer call, each with what it recomputes."""
    swap, tokens = plan.swap, plan.costs.tokens
    if swap.plain:
        yield PlannedSlice(tokens=tokens, kept=all_but_input(run))
        return
    for part in _slices(plan, call):
        kept = saved_names(run, "other") if part.place(OTHER) == "device" else frozenset()
        yield PlannedSlice(tokens=part.tokens, made=frozenset(_recomputed(run, part)), kept=kept)


def _slices(plan: Plan, call: int) -> tuple[TokenRange, ...]:
    return slices_of(plan.swap.storage, call, plan.costs.tokens)


def _recomputed(request: EstimateRequest, part: TokenRange) -> Iterator[str]:
    """Names of the saved tensors that a slice computes again. Outputs of stored products, if saved, are not copied."""
    if not part.recomputes:
        return
    shape = request.shape
    known: set[str] = set()
    for product in layer_products(shape):
        if product.role not in _ROTATED and part.place(product.name) is not None:
            known.add(product.role)
        if part.place(product.adapter_names[0]) is not None:
            known.add(f"within the adapter of {product.role}")
    dropped = part.place("out") is None
    for tensor in saved_tensors(shape, sizes=request.element_bytes):
        wanted = tensor.kind == "other" or (tensor.kind == "attention" and dropped)
        if wanted and tensor.name not in known:
            yield tensor.name
