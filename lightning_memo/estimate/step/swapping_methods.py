"""Training methods that swap activations. The planner chooses alpha, as in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import StreamedBytes
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.memory.slice_settings import Slices
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes, layer_kernels
from lightning_memo.estimate.step.device_bytes import gathered_bytes, logits_bytes
from lightning_memo.estimate.step.layer_times import layer_times
from lightning_memo.estimate.step.layers_estimate import LayersEstimate
from lightning_memo.estimate.step.planner_inputs import device_budget, estimated_layer_costs
from lightning_memo.estimate.step.published_alpha import PUBLISHED_ALPHAS, published_alpha
from lightning_memo.planner import HostMemoryError, plan_swap
from lightning_memo.utils.units import format_bytes

_NO_LIMIT: Final = 2**62


def estimate_swapping(question: Question, parallel: Parallelism) -> LayersEstimate:
    """Estimate a method that swaps, from the plan for it."""
    costs, room = estimated_layer_costs(question, parallel), device_budget(question, parallel)
    # MEMO's authors lowered the linear program's alpha, not the device's share of it.
    alpha_budget = replace(room, device_bytes=_NO_LIMIT) if question.constants.published else room
    try:
        plan = _plan(question, parallel, costs, alpha_budget, _wanted_alpha(question))
    except HostMemoryError as error:
        reason = str(error).replace("host_memory", "cluster.host_bytes")  # else MemoStrategy's setting
        return _too_much_for_host(question, parallel, costs, reason)
    limits = [plan.reason]
    if question.constants.published and _wanted_alpha(question) == "auto":
        plan, rule = _as_published(question, parallel, plan)
        limits.append(rule)
        smaller = _fitting_device(question, parallel, plan, room.device_bytes)
        if smaller is not None:
            limits.append(
                f"alpha={plan.swap.alpha:.4g} needs {format_bytes(plan.device_bytes)} of device memory, but "
                f"{format_bytes(room.device_bytes)} are usable: alpha={smaller.swap.alpha:.4g} is used instead."
            )
            plan = smaller
    fits = plan.device_bytes <= room.device_bytes
    return LayersEstimate(
        status="ok" if fits else "oom",
        alpha=plan.swap.alpha,
        seconds=plan.step_seconds,
        recomputed=0.0 if plan.swap.mode == "plain" else 1.0 - plan.swap.alpha,
        device_bytes=_bytes_of_plan(question, parallel, plan),
        host_bytes=plan.swap.host_bytes,
        disk_bytes=plan.swap.spill_bytes,
        limits=limits,
    )


def _wanted_alpha(question: Question) -> float | str:
    if question.method == "full_swap":
        return 1.0
    return "auto" if question.alpha is None else question.alpha


def _plan(question: Question, parallel: Parallelism, costs: LayerCosts, room: Budget, alpha: float | str) -> Plan:
    fingerprint = Fingerprint(
        model=question.shape.name,
        batch=costs.batch,
        tokens=costs.tokens,
        precision="bf16-true",
        device=question.cluster.device,
        torch="",
        parallel=str(parallel),
    )
    slices = question.sliced
    return plan_swap(
        costs,
        room,
        fingerprint,
        alpha=alpha,
        schedule="layer" if slices is None else slices.schedule,
        slice_tokens=None if slices is None else slices.tokens,
        slot_bytes=lambda fraction: costs.swapped_bytes(0, fraction),
        # MEMO's runs always swap, and a pipeline cannot keep the activations of all its sequences. With slices, the
        # planner in training does not know the memory of a step without slices.
        may_be_plain=not question.constants.published and parallel.pp == 1 and slices is None,
        host_backed="none" if slices is None else slices.host_backed,
        streamed_bytes=None if slices is None else lambda fraction: _streamed_bytes(question, slices, fraction),
    )


def _streamed_bytes(question: Question, slices: Slices, alpha: float) -> StreamedBytes:
    return slices.streamed_bytes(
        question.shape,
        kernels=layer_kernels(question),
        sizes=element_bytes(question),
        tokens=question.seq_len,
        alpha=alpha,
    )


def _as_published(question: Question, parallel: Parallelism, plan: Plan) -> tuple[Plan, str]:
    """The plan that MEMO's authors would have run instead of the linear program's, and a sentence about it."""
    costs, limit = plan.costs, plan.swap.alpha
    times = layer_times(question, parallel)
    # Network adapters use the same links to the host, so copies are not free while the device waits for the network.
    hiding = times.forward - times.network
    hidden = costs.swapped_bytes(0, 1.0) <= hiding * costs.offload_bytes_per_second
    alpha = published_alpha(limit, hidden)
    rule = (
        f"The linear program gives alpha={limit:.4g}. The estimate uses alpha={alpha:g}, as the runs of MEMO's paper, "
        "whose alpha is 1, 1/2, 1/8 or 0, and 0 unless the copies of all tokens can be hidden."
    )
    return _plan(question, parallel, costs, plan.budget, alpha), rule


def _fitting_device(question: Question, parallel: Parallelism, plan: Plan, device_bytes: int) -> Plan | None:
    """The plan with the largest alpha of the paper that fits the device, or None if the given plan fits."""
    if plan.device_bytes <= device_bytes:
        return None
    below = [alpha for alpha in (*(alpha for _, alpha in PUBLISHED_ALPHAS), 0.0) if alpha < plan.swap.alpha]
    plans = (_plan(question, parallel, plan.costs, plan.budget, alpha) for alpha in below)
    return next((smaller for smaller in plans if smaller.device_bytes <= device_bytes), None)


def _bytes_of_plan(question: Question, parallel: Parallelism, plan: Plan) -> dict[str, int]:
    kept = plan.costs.skeletal_bytes if plan.swap.mode == "plain" else 0
    working = plan.working_set_bytes - plan.swap.buffer_bytes - kept
    return _by_category(question, parallel, plan.costs, plan.swap.buffer_bytes, kept, working)


def _by_category(
    question: Question, parallel: Parallelism, costs: LayerCosts, buffers: int, kept: int, working: int
) -> dict[str, int]:
    """Device memory by category. Logits count only if the peak of the working set is outside the layers."""
    logits = round(logits_bytes(question, parallel)) if working == costs.transient_device_bytes else 0
    return {
        "rounding_buffers": buffers,
        "activations": kept,
        "transients": working - logits,
        "logits": logits,
        "gathered": round(gathered_bytes(question, parallel)),
    }


def _too_much_for_host(question: Question, parallel: Parallelism, costs: LayerCosts, reason: str) -> LayersEstimate:
    """Memory that would be needed on the device and the host without the host limit."""
    alpha = question.alpha if question.alpha is not None else float(question.method == "full_swap")
    buffers, working = 2 * costs.swapped_bytes(0, alpha), costs.working_bytes(1.0 - alpha)
    host_bytes = max(costs.calls - 2, 0) * costs.swapped_bytes(0, alpha)
    if question.sliced is not None:
        streamed = _streamed_bytes(question, question.sliced, alpha)
        buffers, host_bytes = 2 * streamed.slot + streamed.staging, streamed.host
        working = costs.working_bytes(min(question.sliced.tokens / question.seq_len, 1.0 - alpha))
    return LayersEstimate(
        status="oohm",
        alpha=alpha,
        seconds=0.0,
        recomputed=1.0 - alpha,
        device_bytes=_by_category(question, parallel, costs, buffers, 0, working),
        host_bytes=host_bytes,
        limits=[f"{reason[0].upper()}{reason[1:]}."],
    )
