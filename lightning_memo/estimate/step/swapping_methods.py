"""Training methods that swap activations. The planner plans as in training."""

from __future__ import annotations

from dataclasses import replace

from lightning_memo.artifacts.layer_costs import LayerCosts
from lightning_memo.artifacts.plan import Plan
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.step.kind_costs import recomputed_work, shares_by_place
from lightning_memo.estimate.step.layers_estimate import LayersEstimate
from lightning_memo.estimate.step.plan_bytes import by_category, bytes_of_plan
from lightning_memo.estimate.step.planner_inputs import device_budget, estimated_layer_costs, largest_slot
from lightning_memo.estimate.step.published_alpha import PUBLISHED_ALPHAS, published_alpha
from lightning_memo.estimate.step.training_plan import (
    NO_LIMIT,
    alpha_plan,
    streamed_bytes,
    training_plan,
    wanted_alpha,
)
from lightning_memo.estimate.times.layer_times import layer_times
from lightning_memo.planner import HostMemoryError
from lightning_memo.utils.units import format_bytes


def estimate_swapping(question: Question, parallel: Parallelism) -> LayersEstimate:
    """Estimate a method that swaps, from the plan for it."""
    costs, room = estimated_layer_costs(question, parallel), device_budget(question, parallel)
    try:
        if not question.constants.published:
            return _outcome(question, parallel, training_plan(question, parallel, costs, room), [])
        # MEMO's authors lowered the linear program's alpha, not the device's share of it.
        unlimited = replace(room, device_bytes=NO_LIMIT)
        plan = alpha_plan(question, parallel, costs, unlimited, wanted_alpha(question))
    except HostMemoryError as error:
        reason = str(error).replace("host_memory", "cluster.host_bytes")  # else MemoStrategy's setting
        return _too_much_for_host(question, parallel, costs, reason)
    limits = [plan.reason]
    if wanted_alpha(question) == "auto":
        plan, rule = _as_published(question, parallel, plan)
        limits.append(rule)
        smaller = _fitting_device(question, parallel, plan, room.device_bytes)
        if smaller is not None:
            limits.append(
                f"alpha={plan.swap.alpha:.4g} needs {format_bytes(plan.device_bytes)} of device memory, but "
                f"{format_bytes(room.device_bytes)} are usable: alpha={smaller.swap.alpha:.4g} is used instead."
            )
            plan = smaller
    return _outcome(question, parallel, plan, limits)


def _as_published(question: Question, parallel: Parallelism, plan: Plan) -> tuple[Plan, str]:
    """The plan that MEMO's authors would have run instead of the linear program's, and a sentence about it."""
    costs, limit = plan.costs, plan.swap.alpha
    times = layer_times(question, parallel)
    # Network adapters use the same links to the host, so copies are not free while the device waits for the network.
    hiding = times.forward - times.network
    hidden = largest_slot(costs, 1.0) <= hiding * costs.offload_bytes_per_second
    alpha = published_alpha(limit, hidden)
    rule = (
        f"The linear program gives alpha={limit:.4g}. The estimate uses alpha={alpha:g}, as the runs of MEMO's paper, "
        "whose alpha is 1, 1/2, 1/8 or 0, and 0 unless the copies of all tokens can be hidden."
    )
    return alpha_plan(question, parallel, costs, plan.budget, alpha), rule


def _fitting_device(question: Question, parallel: Parallelism, plan: Plan, device_bytes: int) -> Plan | None:
    """The plan with the largest alpha of the paper that fits the device, or None if the given plan fits."""
    if plan.device_bytes <= device_bytes:
        return None
    below = [alpha for alpha in (*(alpha for _, alpha in PUBLISHED_ALPHAS), 0.0) if alpha < plan.swap.alpha]
    plans = (alpha_plan(question, parallel, plan.costs, plan.budget, alpha) for alpha in below)
    return next((smaller for smaller in plans if smaller.device_bytes <= device_bytes), None)


def _outcome(question: Question, parallel: Parallelism, plan: Plan, limits: list[str]) -> LayersEstimate:
    costs, swap = plan.costs, plan.swap
    share = 0.0 if swap.mode == "plain" else 1.0 - swap.alpha
    recomputed = share * question.shape.recomputed_flops(question.seq_len)
    seconds = share * sum(costs.recompute_seconds)
    if swap.storage is not None:
        recomputed, seconds = recomputed_work(question, parallel, plan)
    return LayersEstimate(
        status="ok",
        alpha=swap.alpha,
        seconds=plan.step_seconds,
        recomputed=share,
        recomputed_flops=recomputed,
        recompute_seconds=seconds,
        storage=None if swap.storage is None else shares_by_place(plan),
        device_bytes=bytes_of_plan(question, parallel, plan),
        host_bytes=swap.host_bytes,
        disk_bytes=swap.spill_bytes,
        limits=limits or [plan.reason],
    )


def _too_much_for_host(question: Question, parallel: Parallelism, costs: LayerCosts, reason: str) -> LayersEstimate:
    """Memory that would be needed on the device and the host without the host limit."""
    alpha = question.alpha if question.alpha is not None else float(question.method == "full_swap")
    buffers, working = 2 * largest_slot(costs, alpha), costs.working_bytes(1.0 - alpha)
    host_bytes = sum(costs.swapped_bytes(call, alpha) for call in range(costs.calls - 2))
    if question.sliced is not None:
        sizes = streamed_bytes(question, alpha)
        buffers, host_bytes = 2 * sizes.slot + sizes.staging, sizes.host
        working = costs.working_bytes(min(question.sliced.tokens / question.seq_len, 1.0 - alpha))
    return LayersEstimate(
        status="oohm",
        alpha=alpha,
        seconds=0.0,
        recomputed=1.0 - alpha,
        recomputed_flops=0.0,
        recompute_seconds=0.0,
        device_bytes=by_category(question, parallel, buffers, 0, working, costs.transient_device_bytes),
        host_bytes=host_bytes,
        limits=[f"{reason[0].upper()}{reason[1:]}."],
    )
