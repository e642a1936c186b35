"""The plan that training makes: plain, by kinds of tensors, or with a single alpha, from the planner that it calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.storage_budget import StorageBudget
from lightning_memo.artifacts.swap_plan import StreamedBytes
from lightning_memo.config import MemoConfig
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes, layer_kernels
from lightning_memo.estimate.step.kind_costs import estimated_storage_costs, storable_tensors
from lightning_memo.estimate.step.planner_inputs import largest_slot, sequences_in_flight
from lightning_memo.planner import plan_swap
from lightning_memo.planner.alpha.plain_training import plain_plan
from lightning_memo.planner.choose_plan import choose_plan
from lightning_memo.planner.device_budget import usable_device_bytes, with_spare_device
from lightning_memo.planner.storage.plan_storage_kinds import plan_kinds, plan_of_one_micro_batch
from lightning_memo.planner.storage.storage_plan_slices import stored_bytes_of_calls
from lightning_memo.planner.storage.storage_planner import StorageError
from lightning_memo.planner.token_slices import SavedBytes, tile_of

NO_LIMIT: Final = 2**62


def training_plan(question: Question, parallel: Parallelism, costs: LayerCosts, room: Budget) -> Plan:
    """Make the plan that `MemoStrategy` would make with default settings, apart from those of the question.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        costs: Costs of the layers of a step.
        room: Memory of a process.

    Raises:
        HostMemoryError: The host cannot hold the activations that have to be swapped.
    """
    budget = measured_budget(question, costs, room)
    by_kind = None
    if _settings(question, parallel).plans_kinds:
        by_kind = _plan_by_kind(question, parallel, costs, budget)
    return choose_plan(
        by_kind,
        lambda: alpha_plan(question, parallel, costs, budget, wanted_alpha(question)),
        device_measured=True,
    )


def measured_budget(question: Question, costs: LayerCosts, room: Budget) -> Budget:
    """Return the budget of a plan that is made after a first step, whose rounding buffers are then still allocated."""
    sizes = None if question.sliced is None else streamed_bytes(question, 0.0)
    buffers = 2 * largest_slot(costs, 0.0) if sizes is None else 2 * sizes.slot + sizes.staging
    fixed = costs.fixed_device_bytes
    return replace(room, device_bytes=usable_device_bytes(fixed, max(room.device_bytes - fixed - buffers, 0)))


def wanted_alpha(question: Question) -> float | str:
    """Return the alpha of a question: "auto", unless it is given or all activations are swapped."""
    if question.method == "full_swap":
        return 1.0
    return "auto" if question.alpha is None else question.alpha


def alpha_plan(question: Question, parallel: Parallelism, costs: LayerCosts, room: Budget, alpha: float | str) -> Plan:
    """Make a plan with a single alpha (MEMO, section 4.2).

    Raises:
        HostMemoryError: The host cannot hold the activations that have to be swapped.
    """
    slices = question.sliced
    return plan_swap(
        costs,
        room,
        _fingerprint(question, parallel, costs),
        alpha=alpha,
        schedule="layer" if slices is None else slices.schedule,
        slice_tokens=None if slices is None else slices.tokens,
        slot_bytes=lambda fraction: largest_slot(costs, fraction),
        # MEMO's runs always swap, and a pipeline cannot keep the activations of all its sequences. With slices, the
        # planner in training does not know the memory of a step without slices.
        may_be_plain=not question.constants.published and parallel.pp == 1 and slices is None,
        host_backed="none" if slices is None else slices.host_backed,
        streamed_bytes=None if slices is None else lambda fraction: streamed_bytes(question, fraction),
    )


def _settings(question: Question, parallel: Parallelism) -> MemoConfig:
    """The settings of `MemoStrategy` for a question, with `storage="auto"`."""
    return MemoConfig(
        alpha=wanted_alpha(question),
        tensor_parallel_size=parallel.tp,
        context_parallel_size=parallel.cp,
        pipeline_parallel_size=parallel.pp,
        slice_tokens="auto" if question.slices is None else question.slices.tokens,
    )


def _plan_by_kind(question: Question, parallel: Parallelism, costs: LayerCosts, budget: Budget) -> Plan | None:
    """Plain training if that fits, otherwise the best plan by kinds of tensors; None if there is none.

    On a stage of a pipeline it is planned for all sequences in flight, none of which is trained plainly.
    """
    label = _fingerprint(question, parallel, costs)
    plain = plain_plan(costs, budget, label, "layer") if parallel.pp == 1 else None
    if plain is not None:
        return plain
    storage_costs = estimated_storage_costs(question, parallel, costs)
    tensors: list[list[SavedBytes]] = []
    for run in question.runs(parallel):
        products = storage_costs.classes[storage_costs.call_classes[len(tensors)]].products
        tensors += [storable_tensors(run, products, costs.tokens, parallel.tp)] * run.shape.layers
    room = with_spare_device(budget, costs)
    if parallel.pp > 1:
        count = sequences_in_flight(question, parallel)
        storage_costs, tensors = storage_costs.of_micro_batches(count), tensors * count
        room = replace(room, host_bytes=room.host_bytes * count)
    try:
        plan = plan_kinds(
            costs,
            storage_costs,
            StorageBudget.of(room, costs),
            label,
            tile_tokens=tile_of(costs.tokens),
            stored_bytes=lambda plan: stored_bytes_of_calls(plan, tensors, costs.tokens, storage_costs.leaving_calls),
            common_bounds=() if parallel.tp > 1 or parallel.cp > 1 else None,
            nested=parallel.cp > 1,
        )
    except StorageError:
        return None
    return plan if parallel.pp == 1 else plan_of_one_micro_batch(plan)


def _fingerprint(question: Question, parallel: Parallelism, costs: LayerCosts) -> Fingerprint:
    return Fingerprint(
        model=question.shape.name,
        batch=costs.batch,
        tokens=costs.tokens,
        precision=question.precision,
        device=question.cluster.device,
        torch="",
        parallel=str(parallel),
    )


def streamed_bytes(question: Question, alpha: float) -> StreamedBytes:
    """Return the memory of slices that swap one by one."""
    assert question.sliced is not None
    return question.sliced.streamed_bytes(
        question.shape,
        kernels=layer_kernels(question),
        sizes=element_bytes(question),
        tokens=question.seq_len,
        alpha=alpha,
        swap_precision=question.swap_precision,
    )
