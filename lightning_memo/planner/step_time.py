"""Expected time of a step, from the costs of its layer calls (MEMO, section 4.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_memo.artifacts.costs import ATTENTION, MOVED, OTHER, CallCosts, StorageCosts
from lightning_memo.artifacts.prices import Resource
from lightning_memo.artifacts.swap_plan import CallPlan, StoragePlan
from lightning_memo.planner.streamed_bytes import SliceBytes

_BUFFERS: Final = 2  # rounding buffers: one slice is computed while another one is copied
_LAYERS: Final = 3  # the last of so many equal layers waits as all later ones do


@dataclass(slots=True)
class StepTime:
    """Expected seconds of a step.

    Attributes:
        seconds: All seconds, waits included.
        waits: Seconds in which nothing is computed, by the resource that is waited for.
    """

    seconds: float
    waits: dict[Resource, float] = field(default_factory=dict)

    def add(self, compute: float, copies: dict[Resource, float], count: int = 1) -> None:
        """Add seconds of computation that overlap copies: the longest decides.

        Args:
            compute: Seconds of the computation.
            copies: Seconds of the copies by the resource that limits their speed.
            count: How often this happens.
        """
        slowest = max(copies, key=lambda resource: copies[resource])
        self.seconds += count * compute
        self._add_wait(count * (copies[slowest] - compute), slowest)

    def wait(self, until: float, resource: Resource) -> None:
        """Wait until so many seconds are over; not at all if they are."""
        self._add_wait(until - self.seconds, resource)

    def _add_wait(self, seconds: float, resource: Resource) -> None:
        if seconds > 0.0:
            self.seconds += seconds
            self.waits[resource] = self.waits.get(resource, 0.0) + seconds


def step_time(costs: StorageCosts, storage: StoragePlan, *, spread: bool = False) -> StepTime:
    """Return the expected time of a step whose layer calls swap as wholes.

    Each call's copies take place while the next call computes, and each such pair takes as long as the longest of them.
    If all layer calls are equal, this is MEMO's time of a step (section 4.2). The host
    has to launch it, too.

    Args:
        costs: Bytes and seconds of each class of layer calls.
        storage: The plan to evaluate.
        spread: Whether single calls go to the disk, evenly spaced. Host buffers hold a whole call, so that a write may
            last until the next one of them is copied.
    """
    sorts = list(zip(costs.call_classes, storage.call_classes, strict=True))
    work = {sort: _work(costs, costs.classes[sort[0]], storage.calls[sort[1]]) for sort in dict.fromkeys(sorts)}
    forward, back, pairs = StepTime(0.0), StepTime(costs.outside_seconds), costs.pairs(sorts)
    for sort in costs.unpaired(sorts):
        forward.seconds += work[sort].forward_seconds
        back.seconds += work[sort].backward_seconds
    for (copied, computed), count in Counter(pairs).items():
        back.add(work[computed].backward_seconds, work[copied].reads, count)
        if not spread:
            forward.add(work[computed].forward_seconds, work[copied].copies | work[copied].writes, count)
    written = 0.0
    for copied, computed in pairs if spread else ():
        if writing := work[copied].writes.get("disk write bandwidth"):
            forward.wait(written, "disk write bandwidth")
            written = forward.seconds + writing
        forward.add(work[computed].forward_seconds, work[copied].copies)
    forward.wait(written, "disk write bandwidth")
    time = StepTime(forward.seconds + back.seconds, forward.waits | back.waits)
    launching = costs.outside_seconds + costs.launch_seconds * sum(work[sort].passes for sort in sorts)
    return time if time.seconds > launching else StepTime(launching)


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of a layer call: of its computation, and of the copies out and back."""

    forward_seconds: float
    backward_seconds: float
    copies: dict[Resource, float]
    writes: dict[Resource, float]
    reads: dict[Resource, float]
    passes: int  # the forward, the backward and a recomputation of each slice, which the host launches equally fast


def _work(costs: StorageCosts, call: CallCosts, plan: CallPlan) -> _Work:
    moved, spilled = (plan.stored_bytes(call, costs.tokens, *places) for places in (MOVED, ("disk",)))
    writes: dict[Resource, float] = {}
    reads: dict[Resource, float] = {"prefetch bandwidth": moved / costs.prefetch_bytes_per_second}
    if spilled:
        writes["disk write bandwidth"] = spilled / costs.disk_write_bytes_per_second
        reads["disk read bandwidth"] = spilled / costs.disk_read_bytes_per_second
    again = recompute_seconds(call, plan, costs.tokens)
    return _Work(
        forward_seconds=call.forward_seconds,
        backward_seconds=call.backward_seconds + again,
        copies={"offload bandwidth": moved / costs.offload_bytes_per_second},
        writes=writes,
        reads=reads,
        passes=sum(2 + again for again in _recomputing(plan, costs.tokens)),
    )


def _recomputing(plan: CallPlan, tokens: int) -> list[bool]:
    """For each slice of a layer call, whether its tensors are computed again."""
    bounds = sorted({0, tokens, *plan.bounds})
    stored = [range(r.start, r.stop) for r in plan.ranges if r.kind == OTHER]
    return [not any(start in tokens_of for tokens_of in stored) for start in bounds[:-1]]


def recompute_seconds(call: CallCosts, plan: CallPlan, tokens: int) -> float:
    """Return the seconds that a layer call recomputes.

    Args:
        call: Costs of the call.
        plan: What the call stores.
        tokens: Tokens of the call.
    """
    whole = plan.tokens(OTHER)
    again = sum(product.seconds * (tokens - whole - plan.tokens(product.name)) for product in call.products)
    dropped = call.attention_share(tokens - plan.tokens(ATTENTION), tokens) * call.attention_seconds
    return (again + call.elementwise_seconds * (tokens - whole)) / tokens + dropped


def streamed_step_time(
    costs: StorageCosts, slices: Sequence[SliceBytes], by_slice: bool, calls_again: int = 0
) -> StepTime:
    """Return the expected time of a step each of whose slices swaps by itself.

    Args:
        costs: Bytes and seconds of each class of layer calls.
        slices: The slices of a layer call.
        by_slice: Whether all layers run on one slice before the next.
        calls_again: Number of layer calls, the first ones, whose forward runs again in the backward.
    """
    total, again = StepTime(costs.outside_seconds), Counter(costs.call_classes[:calls_again])
    for number, (call, count) in enumerate(zip(costs.classes, costs.class_calls, strict=True)):
        work = slice_work(costs, call, slices)
        forward, back = layer_seconds(work, by_slice)
        computing = sum(part.forward_seconds for part in work)
        total.add(computing, {"offload bandwidth": forward}, count + again[number])
        total.add(sum(part.backward_seconds for part in work), {"prefetch bandwidth": back}, count)
    return total


def seconds_again(costs: StorageCosts, calls_again: int) -> float:
    """Return the seconds of the forwards of the first `calls_again` layer calls."""
    return sum(costs.classes[number].forward_seconds for number in costs.call_classes[:calls_again])


@dataclass(frozen=True, slots=True)
class SliceWork:
    """Seconds of a slice: of its computation, and of the copies of its slot."""

    forward_seconds: float
    backward_seconds: float
    offload_seconds: float
    prefetch_seconds: float


def layer_seconds(work: Sequence[SliceWork], by_slice: bool) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward of a layer call, waits for copies included.

    Slices use two rounding buffers in turn. In the forward, a slice waits until the buffer of the one before the last
    is on the host; in the backward, until its own bytes have returned to a buffer that a later slice has left. Keys and
    values of earlier slices have buffers of their own, and waits for them are part of the measured times.

    Args:
        work: The slices of a layer call.
        by_slice: Whether all layers run on one slice before the next: the slices before and after one are those of
            other layers, of the same tokens.
    """
    groups = [[part] for part in work] if by_slice else [work]
    forward = sum(_seconds([(part.forward_seconds, part.offload_seconds) for part in group], True) for group in groups)
    back = [[(part.backward_seconds, part.prefetch_seconds) for part in reversed(group)] for group in groups]
    return forward, sum(_seconds(group, False) for group in back)


def slice_work(costs: StorageCosts, call: CallCosts, slices: Sequence[SliceBytes]) -> list[SliceWork]:
    """Return the seconds of each slice of a layer call.

    Args:
        costs: Bandwidths of the copies.
        call: Costs of the layer call.
        slices: The slices of the call.
    """
    work: list[SliceWork] = []
    forward, recompute = call.forward_seconds, call.recompute_seconds
    attention = max(1.0 - recompute / forward, 0.0) if forward else 0.0  # share of a layer's time
    tokens, start = sum(part.tokens for part in slices), 0
    for part in slices:
        local, stop = part.tokens / tokens, start + part.tokens
        seen = (stop**2 - start**2) / tokens**2  # share of the pairs under a causal mask
        share = (1.0 - attention) * local + attention * seen
        again = 0.0 if part.swapped else recompute
        work.append(
            SliceWork(
                forward_seconds=share * forward,
                backward_seconds=share * call.backward_seconds + local * again,
                offload_seconds=part.slot / costs.offload_bytes_per_second,
                prefetch_seconds=part.slot / costs.prefetch_bytes_per_second,
            )
        )
        start = stop
    return work


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
