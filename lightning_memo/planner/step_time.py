"""Expected time of a step, from the costs of its layer calls (MEMO, section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from lightning_memo.artifacts.costs import ATTENTION, INPUT, MOVED, OTHER, LayerCosts
from lightning_memo.artifacts.plan import CallPlan, Schedule, SwapPlan
from lightning_memo.artifacts.slot_layouts import DiskLayout
from lightning_memo.planner.host_backed_sizes import SliceBytes

_BUFFERS: Final = 2  # rounding buffers: one slice is computed while another one is copied
_LAYERS: Final = 3  # the last of so many equal layers waits as all later ones do


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


def streamed_step_seconds(costs: LayerCosts, slices: Sequence[SliceBytes], schedule: Schedule) -> float:
    """Expected seconds of a step each of whose slices swaps by itself, waits for copies included.

    Args:
        costs: Seconds, bytes and bandwidths of the layer calls.
        slices: The slices of a layer call.
        schedule: Order in which the slices run.
    """
    seconds, alike = costs.outside_seconds, dict[tuple[float, ...], float]()
    for call, work in enumerate(
        zip(costs.forward_seconds, costs.backward_seconds, costs.recompute_seconds, strict=True)
    ):
        if work not in alike:
            alike[work] = sum(layer_seconds(costs, call, slices, schedule))
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
    spilled = set(swap.disk_calls)
    writing, reading = disk_seconds(costs, swap.memory.slot) if spilled else (0.0, 0.0)
    shares = [_shares(call, swap.storage.tokens) for call in swap.storage.calls]
    for call, number in enumerate(swap.storage.call_classes):
        stored, others = shares[number], costs.moved_other_bytes[call]
        copied_bytes = 0
        if call < swap.swapped_calls:  # the last two calls copy nothing, but recompute like the others
            inputs, attention = costs.input_bytes[call], costs.attention_bytes[call]
            copied_bytes = math.ceil(stored.inputs * inputs + stored.attention * attention + stored.moved * others)
        forward = costs.forward_seconds_at(call, stored.moved)
        backward = costs.backward_seconds_of(call, stored.moved, stored.recomputed)
        forward_seconds += max(forward, copied_bytes / costs.offload_bytes_per_second)
        arriving = max(copied_bytes / costs.prefetch_bytes_per_second, reading if call in spilled else 0.0)
        backward_seconds += max(backward, arriving)
    return costs.outside_seconds + max(forward_seconds, len(spilled) * writing) + backward_seconds


def disk_seconds(costs: LayerCosts, slot_bytes: int) -> tuple[float, float]:
    """Seconds that the disk takes to write, and to read, the activations of one layer call."""
    region_bytes = DiskLayout(slot_bytes).region_bytes
    return region_bytes / costs.disk_write_bytes_per_second, region_bytes / costs.disk_read_bytes_per_second


@dataclass(frozen=True, slots=True)
class _Shares:
    """Fractions of the tokens of a layer call.

    Attributes:
        inputs: Those whose input leaves the device.
        attention: Those whose attention output leaves the device.
        moved: Those whose other activations leave the device.
        recomputed: Those whose other activations are computed again.
    """

    inputs: float
    attention: float
    moved: float
    recomputed: float


def _shares(call: CallPlan, tokens: int) -> _Shares:
    inputs, attention, moved = (call.tokens(kind, *MOVED) / tokens for kind in (INPUT, ATTENTION, OTHER))
    return _Shares(inputs, attention, moved, 1.0 - call.tokens(OTHER) / tokens)


@dataclass(frozen=True, slots=True)
class _SliceWork:
    forward_seconds: float
    backward_seconds: float
    offload_seconds: float
    prefetch_seconds: float


def layer_seconds(
    costs: LayerCosts, call: int, slices: Sequence[SliceBytes], schedule: Schedule
) -> tuple[float, float]:
    """Seconds of the forward and of the backward of a layer call, waits for copies included.

    Slices use two rounding buffers in turn. In the forward, a slice waits until the buffer of the one before the last
    is on the host; in the backward, until its own bytes have returned to a buffer that a later slice has left. Keys and
    values of earlier slices have buffers of their own, and waits for them are part of the measured times.

    Args:
        costs: Seconds, bytes and bandwidths of the layer calls.
        call: Index of the layer call.
        slices: The slices of a layer call.
        schedule: With "slice", the slices before and after one are those of other layers, of the same tokens.
    """
    work = list(_slice_work(costs, call, slices))
    groups = [[part] for part in work] if schedule == "slice" else [work]
    forward = sum(_seconds([(part.forward_seconds, part.offload_seconds) for part in group], True) for group in groups)
    back = [[(part.backward_seconds, part.prefetch_seconds) for part in reversed(group)] for group in groups]
    return forward, sum(_seconds(group, False) for group in back)


def _slice_work(costs: LayerCosts, call: int, slices: Sequence[SliceBytes]) -> Iterator[_SliceWork]:
    forward, recompute = costs.forward_seconds[call], costs.recompute_seconds[call]
    compress = costs.forward_seconds_at(call, 1.0) - forward
    restore = costs.backward_seconds_at(call, 1.0) - costs.backward_seconds[call]
    attention = max(1.0 - recompute / forward, 0.0) if forward else 0.0  # share of a layer's time
    tokens, start = sum(part.tokens for part in slices), 0
    for part in slices:
        local, stop = part.tokens / tokens, start + part.tokens
        seen = (stop**2 - start**2) / tokens**2  # share of the pairs under a causal mask
        share = (1.0 - attention) * local + attention * seen
        yield _SliceWork(
            forward_seconds=share * forward + (local * compress if part.swapped else 0.0),
            backward_seconds=share * costs.backward_seconds[call] + local * (restore if part.swapped else recompute),
            offload_seconds=part.slot / costs.offload_bytes_per_second,
            prefetch_seconds=part.slot / costs.prefetch_bytes_per_second,
        )
        start = stop


def _seconds(slices: Sequence[tuple[float, float]], writes: bool) -> float:
    """Seconds of a layer, given those of the computation and of the copy of each slice.

    Args:
        slices: Seconds in the order in which the slices run.
        writes: Whether a slice is copied after its computation, rather than before.
    """
    free, copied, now, began = [0.0] * _BUFFERS, 0.0, 0.0, 0.0  # times at which something is over
    for layer in range(_LAYERS):
        began = now
        for n, (seconds, copy) in enumerate(slices, layer * len(slices)):
            buffer = n % _BUFFERS
            if writes:
                now = max(now, free[buffer]) + seconds
                copied = free[buffer] = max(copied, now) + copy
            else:
                copied = max(copied, free[buffer]) + copy
                now = free[buffer] = max(now, copied) + seconds
    return now - began
