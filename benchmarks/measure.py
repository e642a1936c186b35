"""Measures methods: memory and gradients once, time in rounds in which each method runs once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from methods import PLAIN, Method, Workload
from torch import Tensor

from lightning_memo.profiler.memory_meter import PeakMeter


@dataclass(slots=True)
class Result:
    """The measurements of one method; values that were not measured are `None` or empty lists.

    Attributes:
        seconds: Duration of a step, one sample per round.
        thread_seconds: Time that the main thread ran on a core in those steps.
        peak_device_bytes: Largest number of bytes in use on the device in a step, without the weights.
        gradient_error: Largest distance of a weight's gradient from that of plain training, relative to its norm.
        status: "ok", or the reason why the method stopped.
    """

    method: Method
    status: str = "ok"
    seconds: list[float] = field(default_factory=list)
    thread_seconds: list[float] = field(default_factory=list)
    peak_device_bytes: int | None = None
    host_bytes: int | None = None
    offloaded_bytes: int | None = None
    overflow_bytes: int | None = None
    gradient_error: float | None = None

    def as_json(self, plain: Result) -> dict[str, Any]:
        """Returns all samples, and the numbers that the table and the picture show."""
        peak, plain_peak = self.peak_device_bytes, plain.peak_device_bytes
        derived = {
            "median_seconds": median(self.seconds) if self.seconds else None,
            "ratio": spread(ratios(self.seconds, plain.seconds)),
            "median_thread_seconds": median(self.thread_seconds) if self.thread_seconds else None,
            "thread_ratio": spread(ratios(self.thread_seconds, plain.thread_seconds)),
            "peak_ratio": peak / plain_peak if peak is not None and plain_peak else None,
        }
        return {**asdict(self), **derived}


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Returns the ratio of each value to the base's value in the same round."""
    return [value / other for value, other in zip(values, base, strict=False)]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Returns the median, the smallest and the largest value."""
    return {"median": median(values), "min": min(values), "max": max(values)} if values else None


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn of a method in a round; `take` makes its measurement."""

    description: str
    take: Callable[[], None]


class Bench:
    """Prepares the measurements. If a method fails, it keeps its results so far, and its later turns do nothing.

    Args:
        workload: The model and the batch.
        methods: The methods to compare; plain training, with which the others are compared, is added if it is missing.
        warmup: Untimed steps at the start of each timed turn.
    """

    def __init__(self, workload: Workload, methods: Sequence[Method], warmup: int) -> None:
        self.results = [Result(method) for method in dict.fromkeys([Method(PLAIN), *methods])]
        self._workload = workload
        self._warmup = warmup
        self._plain_gradients: dict[str, Tensor] = {}

    @property
    def plain(self) -> Result:
        return self.results[0]

    def turns(self, repeats: int) -> list[Turn]:
        """Returns the turns in order: memory and gradients of every method, then `repeats` rounds of times."""
        turns = [self._turn("memory", result, self._meter) for result in self.results]
        for number in range(repeats):
            # The order alternates, because a machine that slows down steadily must not favour the first methods.
            order = self.results if number % 2 == 0 else self.results[::-1]
            turns += [self._turn("time", result, self._time) for result in order]
        return turns

    def _turn(self, what: str, result: Result, measure: Callable[[Result], None]) -> Turn:
        def take() -> None:
            if result.status == "ok":
                result.status = self._attempt(measure, result)

        return Turn(f"{what}, {result.method.name}", take)

    def _attempt(self, measure: Callable[[Result], None], result: Result) -> str:
        """Measures, frees the step's memory, and returns the new status of the method."""
        status = "ok"
        try:
            measure(result)
        except Exception as error:
            status = brief(error)
        self._workload.free_gradients()
        if status != "ok":
            free_garbage(self._workload.device)
        return status

    def _meter(self, result: Result) -> None:
        """Runs one step, which also warms up."""
        workload = self._workload
        with workload.using(result.method, metered=True) as usage_of:
            with PeakMeter(workload.device) as meter:
                workload.step()
                workload.synchronize()
            usage = usage_of()
        result.peak_device_bytes = meter.peak_bytes + usage.buffer_bytes
        result.host_bytes, result.offloaded_bytes = usage.host_bytes, usage.offloaded_bytes
        result.overflow_bytes = usage.overflow_bytes
        self._compare_gradients(result)

    def _compare_gradients(self, result: Result) -> None:
        gradients = {name: p.grad for name, p in self._workload.model.named_parameters() if p.grad is not None}
        if result is self.plain:
            # On the host, because on the device they would add to the measured memory.
            self._plain_gradients = {name: g.to("cpu", copy=True) for name, g in gradients.items()}
        if self._plain_gradients:
            errors = [_distance(g, self._plain_gradients[name]) for name, g in gradients.items()]
            result.gradient_error = max(errors)

    def _time(self, result: Result) -> None:
        workload = self._workload
        self._plain_gradients.clear()
        with workload.using(result.method):
            for _ in range(self._warmup):
                workload.step()
                workload.free_gradients()
            workload.synchronize()
            start, thread_start = time.perf_counter(), time.thread_time()
            workload.step()
            workload.synchronize()
            stop, thread_stop = time.perf_counter(), time.thread_time()
        result.seconds.append(stop - start)
        result.thread_seconds.append(thread_stop - thread_start)


def _distance(gradient: Tensor, plain: Tensor) -> float:
    expected = plain.to(gradient.device).double()
    norm = float(expected.norm())
    distance = float((gradient.double() - expected).norm())
    return distance / norm if norm else distance


def brief(error: Exception) -> str:
    """Returns one line that describes an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def free_garbage(device: torch.device) -> None:
    """Frees the memory that a failed step left, so that the next step has it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
