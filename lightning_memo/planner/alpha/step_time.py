"""Expected time of a step whose plan has a single alpha (MEMO, section 4.2)."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from lightning_memo.artifacts.layer_costs import LayerCosts
from lightning_memo.artifacts.swap_plan import Schedule, StreamedBytes, SwapPlan
from lightning_memo.planner.alpha.disk_tier import disk_seconds
from lightning_memo.planner.alpha.slice_copies import layer_seconds


def steady(costs: LayerCosts) -> LayerCosts:
    """Replace the times of each layer call by the median over the calls of the same sizes.

    In a first step, kernels are selected, caches are filled and pages are touched for the first time, which slows down
    single calls, above all the first. Layers of the same sizes do the same work, so the median is the time of each once
    warm, and a single cold call does not decide the plan through the overlap constraint of the slowest layer.

    Args:
        costs: Costs as measured in the first step.
    """
    sizes = list(zip(costs.input_bytes, costs.attention_bytes, costs.moved_other_bytes, strict=True))

    def medians(seconds: tuple[float, ...]) -> tuple[float, ...]:
        alike: dict[tuple[int, int, int], list[float]] = {}
        for size, value in zip(sizes, seconds, strict=True):
            alike.setdefault(size, []).append(value)
        middle = {size: median(values) for size, values in alike.items()}
        return tuple(middle[size] for size in sizes)

    return replace(
        costs,
        forward_seconds=medians(costs.forward_seconds),
        backward_seconds=medians(costs.backward_seconds),
        recompute_seconds=medians(costs.recompute_seconds),
    )


def streamed_step_seconds(costs: LayerCosts, sizes: StreamedBytes, schedule: Schedule) -> float:
    """Expected seconds of a step each of whose slices swaps by itself, waits for copies included.

    Args:
        costs: Seconds, bytes and bandwidths of the layer calls.
        sizes: Memory of the plan.
        schedule: Order in which the slices run.
    """
    seconds, alike = costs.outside_seconds, dict[tuple[float, ...], float]()
    for call, work in enumerate(
        zip(costs.forward_seconds, costs.backward_seconds, costs.recompute_seconds, strict=True)
    ):
        if work not in alike:
            alike[work] = sum(layer_seconds(costs, call, sizes, schedule))
        seconds += alike[work]
    return seconds


def step_seconds(costs: LayerCosts, swap: SwapPlan) -> float:
    """Expected seconds of a step: for each layer the longer of its computation and its copy (MEMO, section 4.2).

    All forwards together last at least as long as all writes to the disk. Each read overlaps one backward, which waits
    if the read takes longer.

    Args:
        costs: Seconds, bytes and bandwidths of the layer calls.
        swap: The plan to evaluate.
    """
    forward_seconds, backward_seconds = 0.0, 0.0
    writing, reading = disk_seconds(costs, swap.slot_bytes) if swap.spilled_calls else (0.0, 0.0)
    for call in range(costs.calls):
        # The last two calls copy nothing, but recompute like the others.
        copied_bytes = costs.swapped_bytes(call, swap.alpha) if call < swap.swapped_calls else 0
        arriving = max(copied_bytes / costs.prefetch_bytes_per_second, reading if swap.spills(call) else 0.0)
        forward, backward = costs.forward_seconds[call], costs.backward_seconds[call]
        if swap.mode != "plain":
            forward, backward = costs.forward_seconds_at(call, swap.alpha), costs.backward_seconds_at(call, swap.alpha)
        forward_seconds += max(forward, copied_bytes / costs.offload_bytes_per_second)
        backward_seconds += max(backward, arriving)
    return costs.outside_seconds + max(forward_seconds, swap.spilled_calls * writing) + backward_seconds
