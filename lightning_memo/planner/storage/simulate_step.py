"""An independent look at a plan: the schedule of a step, run by its rules. It shares no code with what makes plans.

Four streams each do one thing at a time, in order: compute, offload, prefetch and spill (writes to NVMe, and reads).
Layer calls i and i + 2 share a rounding buffer, which holds what a call moves:

- forward i begins when forward i - 1 has ended and what i - 2 moves has left the buffer;
- the copy of i begins when forward i and the copy before it have ended; what it spills is written meanwhile;
- the last two calls stay in their buffers;
- the prefetch of i begins when the backward of i + 2 and the prefetch before it have ended; what it spilled is read
  meanwhile;
- backward i, what it recomputes first, begins when backward i + 1 and the prefetch of i have ended.

Bytes are on the device while their call's forward runs and until its backward ends, if kept; in the two buffers, which
last the whole step, if moved; on the host or NVMe from the beginning of their copy until their call's backward ends.
Bytes on their way to or from NVMe pass through host memory that lasts the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NoReturn

from lightning_memo.artifacts.storage_budget import StorageBudget
from lightning_memo.artifacts.storage_plan import CallPlan, StoragePlan, StoredRange
from lightning_memo.artifacts.tensor_kind_costs import CallCosts, StorageCosts

Stream = Literal["compute", "offload", "prefetch", "spill"]
Phase = Literal["forward", "backward"]


class ScheduleFault(Enum):
    """What can be wrong with a plan."""

    CLASSES = "there is not one entry for each class of layer calls"
    KIND = "a range is of a kind that the layer call does not have"
    RANGE = "a range is empty, or leaves the tokens of the layer call"
    TWICE = "tokens of one kind have two places"
    INPUT = "tokens of the layer's input have no place"
    PRODUCT = "a product is stored for tokens of which everything is"
    ATTENTION = "everything is stored of tokens whose attention output is not"
    SPILL = "bytes are spilled, and there is no NVMe tier"
    DEVICE = "the device is overfull"
    HOST = "the host is overfull"
    NVME = "the NVMe tier is overfull"


class ScheduleError(ValueError):
    """A plan that can't be executed.

    Attributes:
        fault: What is wrong.
    """

    def __init__(self, fault: ScheduleFault, where: str) -> None:
        super().__init__(f"{fault.value}: {where}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class StreamSpan:
    """What a stream does for a layer call, from start to end in seconds."""

    stream: Stream
    phase: Phase
    call: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """A step as it runs."""

    spans: tuple[StreamSpan, ...]
    step_seconds: float
    peak_device_bytes: int
    peak_host_bytes: int
    peak_nvme_bytes: int


def simulate(costs: StorageCosts, plan: StoragePlan, budget: StorageBudget) -> SimulatedStep:
    """Run a step by the rules of the schedule.

    Args:
        costs: bytes and seconds by class of layer calls.
        plan: only what each class stores is used.
        budget: capacities.

    Returns:
        What happened when.

    Raises:
        ScheduleError: the plan is not possible, or a memory is overfull.
    """
    if len(plan.calls) != len(costs.classes):
        _refuse(ScheduleFault.CLASSES, f"{len(plan.calls)} entries, {len(costs.classes)} classes")
    work = [_work(*each, costs, budget) for each in zip(costs.classes, plan.calls, strict=True)]
    return _Step([work[number] for number in costs.call_classes], costs, budget).run()


def _refuse(fault: ScheduleFault, where: str) -> NoReturn:
    raise ScheduleError(fault, where)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What one layer call computes, holds and moves."""

    forward_seconds: float
    backward_seconds: float  # with what is recomputed
    kept_bytes: int
    swapped_bytes: int
    spilled_bytes: int

    @property
    def moved_bytes(self) -> int:
        return self.swapped_bytes + self.spilled_bytes


def _work(call: CallCosts, plan: CallPlan, costs: StorageCosts, budget: StorageBudget) -> _Work:
    by_kind = _by_kind(call, plan, costs.tokens)
    _check_kinds(by_kind, costs.tokens)
    held = {"keep": 0, "swap": 0, "spill": 0}
    sizes = dict(zip(call.kinds, call.sizes, strict=True))
    for r in plan.ranges:
        held[r.place] += -(-sizes[r.kind] * (r.stop - r.start) // costs.tokens)
    if held["spill"] and budget.nvme is None:
        _refuse(ScheduleFault.SPILL, f"{held['spill']} bytes")
    return _Work(
        forward_seconds=call.forward_seconds,
        backward_seconds=call.backward_seconds + _again(call, by_kind, costs.tokens),
        kept_bytes=held["keep"],
        swapped_bytes=held["swap"],
        spilled_bytes=held["spill"],
    )


def _by_kind(call: CallCosts, plan: CallPlan, tokens: int) -> dict[str, list[StoredRange]]:
    by_kind: dict[str, list[StoredRange]] = {kind: [] for kind in call.kinds}
    for r in sorted(plan.ranges, key=lambda r: r.start):
        if r.kind not in by_kind:
            _refuse(ScheduleFault.KIND, r.kind)
        if not 0 <= r.start < r.stop <= tokens:
            _refuse(ScheduleFault.RANGE, f"{r.kind} [{r.start}, {r.stop}) of {tokens}")
        if by_kind[r.kind] and by_kind[r.kind][-1].stop > r.start:
            _refuse(ScheduleFault.TWICE, f"{r.kind} at token {r.start}")
        by_kind[r.kind].append(r)
    return by_kind


def _check_kinds(by_kind: dict[str, list[StoredRange]], tokens: int) -> None:
    for start, stop in _gaps(by_kind["input"], tokens):
        _refuse(ScheduleFault.INPUT, f"tokens [{start}, {stop})")
    dropped = list(_gaps(by_kind["attention"], tokens))
    for r in by_kind["all"]:
        if any(start < r.stop and r.start < stop for start, stop in dropped):
            _refuse(ScheduleFault.ATTENTION, f"tokens [{r.start}, {r.stop})")
        for kind, ranges in by_kind.items():
            product = kind not in ("input", "attention", "all")
            if product and any(other.start < r.stop and r.start < other.stop for other in ranges):
                _refuse(ScheduleFault.PRODUCT, f"{kind} within tokens [{r.start}, {r.stop})")


def _gaps(ranges: Sequence[StoredRange], tokens: int) -> Iterator[tuple[int, int]]:
    """Tokens between ranges, which are in order."""
    last = 0
    for r in ranges:
        if last < r.start:
            yield last, r.start
        last = r.stop
    if last < tokens:
        yield last, tokens


def _again(call: CallCosts, by_kind: dict[str, list[StoredRange]], tokens: int) -> float:
    """Seconds of what is computed a second time."""
    missing = {
        kind: tokens - sum(r.stop - r.start for r in ranges + (by_kind["all"] if kind != "all" else []))
        for kind, ranges in by_kind.items()
    }
    seconds = call.elementwise_seconds * missing["all"] / tokens
    seconds += sum(product.seconds * missing[product.name] / tokens for product in call.products)
    for start, stop in _gaps(by_kind["attention"], tokens):
        seconds += call.attention_seconds * _attended(call, start, stop, tokens) / _attended(call, 0, tokens, tokens)
    return seconds


def _attended(call: CallCosts, start: int, stop: int, tokens: int) -> float:
    """Area under min(token, window) from start to stop."""
    window = tokens if call.window_tokens is None else min(call.window_tokens, tokens)
    rising, flat = max(min(stop, window) - start, 0), max(stop - max(start, window), 0)
    return rising * (start + min(stop, window)) / 2 + flat * window


@dataclass(slots=True)
class _Memory:
    """What a memory holds, as changes in bytes at points in time."""

    fault: ScheduleFault
    capacity_bytes: int
    changes: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, bytes less, layer call

    def hold(self, size_bytes: int, call: int, start: float, end: float = math.inf) -> None:
        if size_bytes:
            self.changes += [(start, -size_bytes, call), (end, size_bytes, call)]

    def peak_bytes(self) -> int:
        """Goes through time; what begins when something else ends is held beside it."""
        used = peak = 0
        for seconds, less, call in sorted(self.changes):
            used -= less
            peak = max(peak, used)
            if used > self.capacity_bytes:
                where = f"layer call {call} brings it to {used} of {self.capacity_bytes} bytes"
                _refuse(self.fault, f"{where} after {seconds:.3g} s")
        return peak


class _Step:
    """A step that runs: when each stream and buffer gets free, and what each memory holds."""

    def __init__(self, work: Sequence[_Work], costs: StorageCosts, budget: StorageBudget) -> None:
        self._work, self._costs, self._budget = work, costs, budget
        self._free: dict[Stream, float] = {"compute": 0.0, "offload": 0.0, "prefetch": 0.0, "spill": 0.0}
        self._buffer_free = [0.0, 0.0]
        self._began = [0.0] * len(work)  # forwards
        self._copied = [(0.0, 0.0)] * len(work)  # copies out: start and end
        self._spans: list[StreamSpan] = []
        self._device = _Memory(ScheduleFault.DEVICE, budget.device_bytes)
        self._host = _Memory(ScheduleFault.HOST, budget.host_bytes)
        self._nvme = _Memory(ScheduleFault.NVME, budget.nvme.capacity_bytes if budget.nvme else 0)

    def run(self) -> SimulatedStep:
        buffers = 2 * max(work.moved_bytes for work in self._work)
        self._device.hold(self._costs.fixed_device_bytes + self._costs.transient_device_bytes + buffers, 0, 0.0)
        order = list(enumerate(self._work))
        leaving = order[:-2]
        if self._budget.nvme:
            largest = max((work.spilled_bytes for _, work in leaving), default=0)
            self._host.hold(math.ceil(self._budget.nvme.bounce_share * largest), 0, 0.0)
        for call, work in order:
            self._forward(call, work)
            if call < len(leaving) and work.moved_bytes:
                self._copy_out(call, work)
        for call, work in reversed(order):
            if call < len(leaving) and work.moved_bytes:
                self._copy_back(call, work)
            self._backward(call, work)
        return SimulatedStep(
            spans=tuple(self._spans),
            step_seconds=self._costs.outside_seconds + self._free["compute"],
            peak_device_bytes=self._device.peak_bytes(),
            peak_host_bytes=self._host.peak_bytes(),
            peak_nvme_bytes=self._nvme.peak_bytes(),
        )

    def _forward(self, call: int, work: _Work) -> None:
        self._began[call], _ = self._do("compute", "forward", call, self._buffer_free[call % 2], work.forward_seconds)

    def _copy_out(self, call: int, work: _Work) -> None:
        seconds = work.moved_bytes / self._costs.offload_bytes_per_second
        start, end = self._do("offload", "forward", call, self._free["compute"], seconds)
        if self._budget.nvme and work.spilled_bytes:
            seconds = work.spilled_bytes / self._budget.nvme.write_bytes_per_second
            end = self._beside("offload", "forward", call, start, seconds)
        self._buffer_free[call % 2] = end
        self._copied[call] = start, end

    def _copy_back(self, call: int, work: _Work) -> None:
        seconds = work.moved_bytes / self._costs.prefetch_bytes_per_second
        ready = max(self._buffer_free[call % 2], self._copied[call][1])
        start, _ = self._do("prefetch", "backward", call, ready, seconds)
        if self._budget.nvme and work.spilled_bytes:
            self._beside(
                "prefetch", "backward", call, start, work.spilled_bytes / self._budget.nvme.read_bytes_per_second
            )

    def _backward(self, call: int, work: _Work) -> None:
        moved = call < len(self._work) - 2 and work.moved_bytes
        ready = self._free["prefetch"] if moved else 0.0
        _, end = self._do("compute", "backward", call, ready, work.backward_seconds)
        self._buffer_free[call % 2] = end
        self._device.hold(work.kept_bytes, call, self._began[call], end)
        if moved:
            self._host.hold(work.swapped_bytes, call, self._copied[call][0], end)
            self._nvme.hold(work.spilled_bytes, call, self._copied[call][0], end)

    def _do(self, stream: Stream, phase: Phase, call: int, ready: float, seconds: float) -> tuple[float, float]:
        """Occupy a stream once it is free and what it needs is ready; returns start and end."""
        start = max(self._free[stream], ready)
        self._free[stream] = end = start + seconds
        self._spans.append(StreamSpan(stream, phase, call, start, end))
        return start, end

    def _beside(self, link: Stream, phase: Phase, call: int, start: float, seconds: float) -> float:
        """Write or read on NVMe while a copy runs; whichever is slower holds up the other."""
        _, end = self._do("spill", phase, call, start, seconds)
        self._free[link] = self._free["spill"] = end = max(end, self._free[link])
        return end
