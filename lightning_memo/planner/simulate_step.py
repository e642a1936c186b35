"""Checks a storage plan independently of the planner, with which it shares no code, by simulating the step.

Four streams execute one operation at a time, in order: compute, offload, prefetch and spill (writes to and reads from
the disk). Layer calls i and i + 2 share a rounding buffer, which holds the activations that a call moves:

- forward i starts when forward i - 1 has ended and the offload of call i - 2 has emptied the buffer;
- the offload of call i starts when forward i and the previous offload have ended; its spilled part is written to the
  disk at the same time;
- the last two calls stay in their buffers, unless several micro-batches are in flight;
- the prefetch of call i starts when backward i + 2 and the previous prefetch have ended; its spilled part is read from
  the disk at the same time;
- backward i, with its recomputation, starts when backward i + 1 and the prefetch of call i have ended.

Kept bytes are on the device from the start of their call's forward to the end of its backward. Moved bytes are in the
two rounding buffers, which last the whole step, and on the host or the disk from the start of their offload to the end
of their call's backward. Spilled bytes pass through bounce buffers in host memory, which last the whole step, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NoReturn

from lightning_memo.artifacts.costs import Budget, CallCosts, StorageCosts, is_product
from lightning_memo.artifacts.swap_plan import CallPlan, StoragePlan, StoredRange

Stream = Literal["compute", "offload", "prefetch", "spill"]
Phase = Literal["forward", "backward"]


class ScheduleFault(Enum):
    """Reasons why a storage plan is invalid."""

    CALLS = "the plan does not have a class for each layer call"
    KIND = "a range names a kind of tensor that the layer call does not have"
    RANGE = "a range is empty or exceeds the tokens of the layer call"
    TWICE = "a kind of tensor is stored twice for the same tokens"
    INPUT = "the layer's input is not stored for all tokens"
    PRODUCT = "a product is stored for tokens of which all tensors are stored"
    ATTENTION = "all tensors are stored for tokens whose attention output is not"
    SPILL = "bytes are spilled without a disk"
    DEVICE = "the device memory is exceeded"
    HOST = "the host memory is exceeded"
    DISK = "the disk's capacity is exceeded"


class ScheduleError(ValueError):
    """A plan that cannot be executed.

    Attributes:
        fault: The reason.
    """

    def __init__(self, fault: ScheduleFault, where: str) -> None:
        super().__init__(f"{fault.value}: {where}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class StreamSpan:
    """An operation of a stream for a layer call; start and end in seconds."""

    stream: Stream
    phase: Phase
    call: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """Operations and memory peaks of a simulated step."""

    spans: tuple[StreamSpan, ...]
    step_seconds: float
    peak_device_bytes: int
    peak_host_bytes: int
    peak_disk_bytes: int


def simulate(costs: StorageCosts, plan: StoragePlan, budget: Budget, bounce_share: float = 0.0) -> SimulatedStep:
    """Simulate a step.

    Args:
        costs: Bytes and seconds of the layer calls.
        plan: The plan, which has classes of its own if it treats calls of one class differently.
        budget: Capacities.
        bounce_share: Host bytes of the bounce buffers per byte of the largest amount that a layer call spills.

    Returns:
        The operations and memory peaks of the step.

    Raises:
        ScheduleError: The plan is invalid, or exceeds the capacity of a memory.
    """
    if len(plan.call_classes) != costs.calls:
        _refuse(ScheduleFault.CALLS, f"{len(plan.call_classes)} classes, {costs.calls} calls")
    costs = costs.of_plan(plan.call_classes)
    work = [_work(*each, costs, budget) for each in zip(costs.classes, plan.calls, strict=True)]
    return _Step([work[number] for number in costs.call_classes], costs, budget, bounce_share).run()


def _refuse(fault: ScheduleFault, where: str) -> NoReturn:
    raise ScheduleError(fault, where)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Seconds and bytes of one layer call."""

    forward_seconds: float
    backward_seconds: float  # recomputation included
    kept_bytes: int
    swapped_bytes: int
    spilled_bytes: int
    recomputed_bytes: int

    @property
    def moved_bytes(self) -> int:
        return self.swapped_bytes + self.spilled_bytes


def _work(call: CallCosts, plan: CallPlan, costs: StorageCosts, budget: Budget) -> _Work:
    by_kind = _by_kind(call, plan, costs.tokens)
    _check_kinds(by_kind, costs.tokens)
    held = {"device": 0, "host": 0, "disk": 0}
    for r in plan.ranges:
        size = dict(zip(call.kinds, call.sizes, strict=True))[r.kind]
        held[r.place] += -(-size * (r.stop - r.start) // costs.tokens)
    if held["disk"] and not budget.disk_bytes:
        _refuse(ScheduleFault.SPILL, f"{held['disk']} bytes")
    recomputed = sum(stop - start for start, stop in _gaps(by_kind["other"], costs.tokens))
    return _Work(
        forward_seconds=call.forward_seconds,
        backward_seconds=call.backward_seconds + _recompute_seconds(call, by_kind, costs.tokens),
        kept_bytes=held["device"],
        swapped_bytes=held["host"],
        spilled_bytes=held["disk"],
        recomputed_bytes=-(-call.other_bytes * recomputed // costs.tokens),
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
    for r in by_kind["other"]:
        if any(start < r.stop and r.start < stop for start, stop in dropped):
            _refuse(ScheduleFault.ATTENTION, f"tokens [{r.start}, {r.stop})")
        for kind, ranges in by_kind.items():
            if is_product(kind) and any(other.start < r.stop and r.start < other.stop for other in ranges):
                _refuse(ScheduleFault.PRODUCT, f"{kind} within tokens [{r.start}, {r.stop})")


def _gaps(ranges: Sequence[StoredRange], tokens: int) -> Iterator[tuple[int, int]]:
    """Tokens between sorted ranges."""
    last = 0
    for r in ranges:
        if last < r.start:
            yield last, r.start
        last = r.stop
    if last < tokens:
        yield last, tokens


def _recompute_seconds(call: CallCosts, by_kind: dict[str, list[StoredRange]], tokens: int) -> float:
    """Seconds of recomputation."""
    missing = {
        kind: tokens - sum(r.stop - r.start for r in ranges + (by_kind["other"] if kind != "other" else []))
        for kind, ranges in by_kind.items()
    }
    seconds = call.elementwise_seconds * missing["other"] / tokens
    seconds += sum(product.seconds * missing[product.name] / tokens for product in call.products)
    for start, stop in _gaps(by_kind["attention"], tokens):
        seconds += call.attention_seconds * _attended(call, start, stop, tokens) / _attended(call, 0, tokens, tokens)
    return seconds


def _attended(call: CallCosts, start: int, stop: int, tokens: int) -> float:
    """Area under min(token, window) from start to stop, which is proportional to the time of attention."""
    window = tokens if call.window_tokens is None else min(call.window_tokens, tokens)
    rising, flat = max(min(stop, window) - start, 0), max(stop - max(start, window), 0)
    return rising * (start + min(stop, window)) / 2 + flat * window


@dataclass(slots=True)
class _Memory:
    """Use of a memory over time, as a list of changes."""

    fault: ScheduleFault
    capacity_bytes: int
    changes: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, freed bytes, layer call

    def hold(self, size_bytes: int, call: int, start: float, end: float = math.inf) -> None:
        if size_bytes:
            self.changes += [(start, -size_bytes, call), (end, size_bytes, call)]

    def peak_bytes(self) -> int:
        """Highest use. Bytes that are allocated when others are freed count in addition to them."""
        used = peak = 0
        for seconds, less, call in sorted(self.changes):
            used -= less
            peak = max(peak, used)
            if used > self.capacity_bytes:
                where = f"layer call {call} brings it to {used} of {self.capacity_bytes} bytes"
                _refuse(self.fault, f"{where} after {seconds:.3g} s")
        return peak


class _Step:
    """State of the simulation: when each stream and buffer becomes free, and the use of each memory."""

    def __init__(self, work: Sequence[_Work], costs: StorageCosts, budget: Budget, bounce_share: float) -> None:
        self._work, self._costs, self._bounce_share = work, costs, bounce_share
        self._leaving = len(work) - (2 if costs.in_flight in (None, 1) else 0)
        self._free: dict[Stream, float] = {"compute": 0.0, "offload": 0.0, "prefetch": 0.0, "spill": 0.0}
        self._buffer_free = [0.0, 0.0]
        self._began = [0.0] * len(work)  # forwards
        self._copied = [(0.0, 0.0)] * len(work)  # copies out: start and end
        self._spans: list[StreamSpan] = []
        self._device = _Memory(ScheduleFault.DEVICE, budget.device_bytes)
        self._host = _Memory(ScheduleFault.HOST, budget.host_bytes)
        self._disk = _Memory(ScheduleFault.DISK, budget.disk_bytes)

    def run(self) -> SimulatedStep:
        buffers = 2 * max(work.moved_bytes for work in self._work)
        spared = max(call.other_bytes for call in self._costs.classes) - max(w.recomputed_bytes for w in self._work)
        transient = self._costs.transient_device_bytes - min(spared, self._costs.recomputed_device_bytes)
        self._device.hold(self._costs.fixed_device_bytes + transient + buffers, 0, 0.0)
        order = list(enumerate(self._work))
        leaving = order[: self._leaving]
        largest = max((work.spilled_bytes for _, work in leaving), default=0)
        self._host.hold(math.ceil(self._bounce_share * largest), 0, 0.0)
        for call, work in order:
            self._forward(call, work)
            if call < self._leaving and work.moved_bytes:
                self._copy_out(call, work)
        for call, work in reversed(order):
            if call < self._leaving and work.moved_bytes:
                self._copy_back(call, work)
            self._backward(call, work)
        return SimulatedStep(
            spans=tuple(self._spans),
            step_seconds=self._costs.outside_seconds + self._free["compute"],
            peak_device_bytes=self._device.peak_bytes(),
            peak_host_bytes=self._host.peak_bytes(),
            peak_disk_bytes=self._disk.peak_bytes(),
        )

    def _forward(self, call: int, work: _Work) -> None:
        self._began[call], _ = self._do("compute", "forward", call, self._buffer_free[call % 2], work.forward_seconds)

    def _copy_out(self, call: int, work: _Work) -> None:
        seconds = work.moved_bytes / self._costs.offload_bytes_per_second
        start, end = self._do("offload", "forward", call, self._free["compute"], seconds)
        if work.spilled_bytes:
            seconds = work.spilled_bytes / self._costs.disk_write_bytes_per_second
            end = self._spill_during("offload", "forward", call, start, seconds)
        self._buffer_free[call % 2] = end
        self._copied[call] = start, end

    def _copy_back(self, call: int, work: _Work) -> None:
        seconds = work.moved_bytes / self._costs.prefetch_bytes_per_second
        ready = max(self._buffer_free[call % 2], self._copied[call][1])
        start, _ = self._do("prefetch", "backward", call, ready, seconds)
        if work.spilled_bytes:
            seconds = work.spilled_bytes / self._costs.disk_read_bytes_per_second
            self._spill_during("prefetch", "backward", call, start, seconds)

    def _backward(self, call: int, work: _Work) -> None:
        moved = call < self._leaving and work.moved_bytes
        ready = self._free["prefetch"] if moved else 0.0
        _, end = self._do("compute", "backward", call, ready, work.backward_seconds)
        self._buffer_free[call % 2] = end
        self._device.hold(work.kept_bytes, call, self._began[call], end)
        if moved:
            self._host.hold(work.swapped_bytes, call, self._copied[call][0], end)
            self._disk.hold(work.spilled_bytes, call, self._copied[call][0], end)

    def _do(self, stream: Stream, phase: Phase, call: int, ready: float, seconds: float) -> tuple[float, float]:
        """Run an operation once its stream is free and its inputs are ready; returns start and end."""
        start = max(self._free[stream], ready)
        self._free[stream] = end = start + seconds
        self._spans.append(StreamSpan(stream, phase, call, start, end))
        return start, end

    def _spill_during(self, link: Stream, phase: Phase, call: int, start: float, seconds: float) -> float:
        """Write to or read from the disk during a copy; both end when the slower one does."""
        _, end = self._do("spill", phase, call, start, seconds)
        self._free[link] = self._free["spill"] = end = max(end, self._free[link])
        return end
