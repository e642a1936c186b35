"""How long a step takes in which alpha says what is swapped."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from lightning_memo.artifacts.layer_costs import LayerCosts
from lightning_memo.artifacts.plan import SwapPlan
from lightning_memo.planner.alpha.spilled_calls import disk_seconds


def steady(costs: LayerCosts) -> LayerCosts:
    """Replace the times of each layer call by the median over the calls that have the same sizes.

    A first step is cold: kernels are chosen, caches filled, pages touched, and that falls on single calls, the first
    above all. Layers of one size do the same work, so their median is what each takes once warm, and the LP, which
    the worst layer decides, is not ruled by one cold call.
    """
    sizes = list(zip(costs.input_bytes, costs.attention_bytes, costs.other_bytes, strict=True))

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


def step_seconds(costs: LayerCosts, swap: SwapPlan) -> float:
    """Expected seconds of a step: each layer's compute or its copy, whichever takes longer (MEMO, section 4.2).

    All forwards together last at least as long as the disk writes; it reads while one backward runs, or that waits.
    """
    forward_seconds, backward_seconds = 0.0, 0.0
    writing, reading = disk_seconds(costs, swap.slot_bytes) if swap.spilled_calls else (0.0, 0.0)
    for call in range(costs.calls):
        # The last two calls copy nothing, but recompute like the others.
        copied_bytes = costs.swapped_bytes(call, swap.alpha) if call < swap.swapped_calls else 0
        recomputed = 0.0 if swap.mode == "plain" else (1.0 - swap.alpha) * costs.recompute_seconds[call]
        arriving = max(copied_bytes / costs.prefetch_bytes_per_second, reading if swap.spills(call) else 0.0)
        forward_seconds += max(costs.forward_seconds[call], copied_bytes / costs.offload_bytes_per_second)
        backward_seconds += max(costs.backward_seconds[call] + recomputed, arriving)
    return costs.outside_seconds + max(forward_seconds, swap.spilled_calls * writing) + backward_seconds
