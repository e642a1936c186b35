"""Fits efficiencies to measured seconds, by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from lightning_memo.artifacts.layer_costs import LayerCosts
from lightning_memo.estimate.inputs.cluster import Cluster
from lightning_memo.estimate.inputs.constants import Constants
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.times.layer_times import LayerTimes, layer_times
from lightning_memo.estimate.times.outside_times import head_seconds, loss_seconds
from lightning_memo.planner.alpha.step_time import steady
from lightning_memo.shapes.model_shape import ModelShape

EFFICIENCIES: Final = ("dense_efficiency", "attention_forward_efficiency", "attention_backward_efficiency")
_DENSE, _ATTENTION_FORWARD, _ATTENTION_BACKWARD = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMeasurement:
    """Layer costs that the first step of a run measured, on one device."""

    origin: str
    """Name of the run."""

    shape: ModelShape
    costs: LayerCosts

    def __post_init__(self) -> None:
        if self.costs.calls != self.shape.layers:
            raise ValueError(
                f"{self.origin} has {self.costs.calls} layer calls, but {self.shape.name} has "
                f"{self.shape.layers} layers: give the model of the run"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """Time of forward and backward in plain training, on one device."""

    origin: str
    shape: ModelShape
    batch: int
    tokens: int
    seconds: float


Measurement = LayerMeasurement | StepMeasurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """Difference between a measurement and its fit."""

    what: str
    measured_seconds: float
    fitted_seconds: float

    @property
    def percent(self) -> float:
        return 100 * (self.fitted_seconds / self.measured_seconds - 1)

    def __str__(self) -> str:
        return f"{self.what}: {self.measured_seconds:.4g} s measured, {self.percent:+.1f} %"


@dataclass(frozen=True, slots=True)
class _Row:
    """A measured time, and the times of its parts, in seconds."""

    what: str
    at_peak: dict[int, float]
    """Parts whose efficiency is fitted, at the peak."""

    seconds: float
    known: float
    """Part whose efficiency is known: memory-bound operations."""


def fit(
    measurements: Sequence[Measurement], cluster: Cluster, base: Constants
) -> tuple[Constants, tuple[Residual, ...]]:
    """Fit the constants with which the cost model predicts the measured times most closely.

    Measurements of full steps alone do not separate attention's forward from its backward. In this case, their ratio is
    taken from `base`. The bandwidth is the median of the measured layers, or that of `base` without such measurements.

    Args:
        measurements: Measurements of one kind of machine.
        cluster: Cluster to whose peaks the efficiencies are relative.
        base: Constants for everything that is not measured.

    Returns:
        The constants, with the source text of `base`, and the residuals.

    Raises:
        ValueError: There are no measurements, or they exceed the peaks of the cluster.
    """
    rows = [row for m in measurements for row in _rows(m, cluster, base) if row.seconds > 0]
    if not rows:
        raise ValueError("there are no measurements: give files of runs, or lengths to run")
    layers = [m for m in measurements if isinstance(m, LayerMeasurement)]
    slowness = _solve(rows, None if layers else base)
    constants = _with_efficiencies(base, [1 / value for value in slowness])
    if layers:
        constants = replace(constants, host_efficiency=_host_efficiency(layers, cluster))
    residuals = tuple(
        Residual(
            what=row.what,
            measured_seconds=row.seconds,
            fitted_seconds=row.known + sum(value * slowness[column] for column, value in row.at_peak.items()),
        )
        for row in rows
    )
    return constants, residuals


def _with_efficiencies(base: Constants, values: Sequence[float]) -> Constants:
    dense, attention_forward, attention_backward = values
    return replace(
        base,
        dense_efficiency=dense,
        attention_forward_efficiency=attention_forward,
        attention_backward_efficiency=attention_backward,
    )


def _solve(rows: Sequence[_Row], ratio_of: Constants | None) -> list[float]:
    """Returns the reciprocals of the efficiencies.

    Raises:
        ValueError: An efficiency is not between 0 and 1.
    """
    relative = np.array([[row.at_peak.get(column, 0.0) / row.seconds for column in range(3)] for row in rows])
    free = np.eye(3)
    if ratio_of is not None:
        ratio = ratio_of.attention_forward_efficiency / ratio_of.attention_backward_efficiency
        free = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, ratio]])
    fitted = np.array([1.0 - row.known / row.seconds for row in rows])
    values = [float(value) for value in free @ np.linalg.lstsq(relative @ free, fitted, rcond=None)[0]]
    for name, value in zip(EFFICIENCIES, values, strict=True):
        if value < 1.0:
            raise ValueError(
                f"{name} would be {'infinite' if value <= 0 else f'{1 / value:.3g}'}, but cannot exceed "
                "1: measure longer sequences, or give the cluster.peak_flops of the measured machine"
            )
    return values


def _rows(measurement: Measurement, cluster: Cluster, base: Constants) -> Iterator[_Row]:
    origin, shape = measurement.origin, measurement.shape
    if shape.parts:
        raise ValueError(f"{origin}: the layers of {shape.name} differ; calibrate with a model of equal layers")
    if isinstance(measurement, StepMeasurement):
        times, head, loss = _at_peak(measurement.shape, cluster, base, measurement.tokens)
        calls = measurement.shape.layers * measurement.batch
        terms = {
            _DENSE: 3 * calls * times.dense + measurement.batch * head,
            _ATTENTION_FORWARD: calls * times.attention_forward,
            _ATTENTION_BACKWARD: calls * times.attention_backward,
        }
        known = calls * (times.memory_bound + times.memory_bound_backward) + measurement.batch * loss
        yield _Row(f"{measurement.origin}, step", terms, measurement.seconds, known)
        return
    costs = steady(measurement.costs)
    times, *_ = _at_peak(measurement.shape, cluster, base, costs.tokens)
    forward = {_DENSE: times.dense, _ATTENTION_FORWARD: times.attention_forward}
    backward = {_DENSE: times.dense_backward, _ATTENTION_BACKWARD: times.attention_backward}
    copied = 2 * (costs.input_bytes[0] + costs.attention_bytes[0]) / costs.batch  # into a slot
    by_part: dict[str, tuple[tuple[float, ...], dict[int, float], float]] = {
        "forward": (
            costs.forward_seconds,
            forward,
            times.memory_bound + copied / (cluster.memory_bandwidth * base.memory_efficiency),
        ),
        "backward": (costs.backward_seconds, backward, times.memory_bound_backward),
        "recomputation": (
            costs.recompute_seconds,
            {_DENSE: times.recomputed_dense},
            times.recomputed_memory_bound,
        ),
    }
    for part, (seconds, terms, known) in by_part.items():
        of_batch = {column: costs.batch * value for column, value in terms.items()}
        yield _Row(f"{measurement.origin}, {part} of a layer", of_batch, median(seconds), costs.batch * known)


def _at_peak(shape: ModelShape, cluster: Cluster, base: Constants, tokens: int) -> tuple[LayerTimes, float, float]:
    """Times of a layer and of the head at the peak of the cluster, and the time of the loss."""
    ideal = _with_efficiencies(base, [1.0] * len(EFFICIENCIES))
    question = Question(
        shape=shape, cluster=cluster, constants=ideal, method="memo", gpus=1, seq_len=tokens, batch_size=1
    )
    one = Parallelism()
    return layer_times(question, one), head_seconds(question, one), loss_seconds(question, one)


def _host_efficiency(layers: Sequence[LayerMeasurement], cluster: Cluster) -> float:
    copied = median(min(m.costs.offload_bytes_per_second, m.costs.prefetch_bytes_per_second) for m in layers)
    alone = cluster.host_bandwidth_of(1)
    if copied > alone:
        raise ValueError(
            f"copies ran at {copied:.3g} bytes per second, above cluster.host_bandwidth={alone:.3g}: give the "
            "host_bandwidth of the measured machine"
        )
    return copied / alone
