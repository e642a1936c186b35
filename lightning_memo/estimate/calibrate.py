"""Command line ``python -m lightning_memo.estimate calibrate [overrides]``: fits constants to measured runs."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import hydra
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_memo import __version__
from lightning_memo.artifacts.costs import LayerCosts
from lightning_memo.artifacts.plan import Plan
from lightning_memo.cli.hydra_command import config_dir, exit_for_user, plain_settings, run_command
from lightning_memo.estimate.cluster import Cluster, Constants, cluster_of, constants_of, model_of
from lightning_memo.estimate.command import read_count
from lightning_memo.estimate.request import EstimateRequest, Parallelism
from lightning_memo.estimate.step_times import LayerTimes, head_seconds, layer_times, loss_seconds
from lightning_memo.shapes.hf_config import shape_of
from lightning_memo.shapes.model_shape import ModelShape
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import read_length

_PLAIN = "plain"
EFFICIENCIES: Final = ("dense_efficiency", "attention_forward_efficiency", "attention_backward_efficiency")
_DENSE, _ATTENTION_FORWARD, _ATTENTION_BACKWARD = range(3)


def calibrate(settings: Mapping[str, Any], model: str) -> tuple[Constants, tuple[Residual, ...]]:
    """Run or read measurements, fit the constants, and write them to a file.

    Args:
        settings: Settings of `conf/calibrate.yaml`.
        model: Name for a model without a path.

    Raises:
        ValueError: A setting is not allowed, there are no measurements, or they exceed the peaks of the cluster.
        OSError: A file cannot be read or written.
    """
    cluster, shape = cluster_of(settings["cluster"]), model_of(settings["model"], model)
    if settings["files"]:
        files = _files(settings["files"])
        measurements = [m for path in files for m in _read(path, shape)]
        if not measurements:
            raise ValueError(
                f"files={settings['files']}: no measurements in any of {len(files)} files: give the "
                "memo_plan.json of a run with the model= of that run, or results of benchmarks/engine.py"
            )
        devices = [str(path) for path in files]
    else:
        measurements, devices = _run(
            settings["model"], shape, _lengths(settings["seq_lens"]), read_count("repeats", settings["repeats"])
        )
    constants, residuals = fit(measurements, cluster, constants_of(cluster.name))
    constants = replace(
        constants,
        source=_source(devices, cluster.name),
        note="",
        cluster=cluster.name,
        measurements=tuple(map(str, residuals)),
    )
    with replacing(Path(str(settings["output"]))) as unfinished:
        unfinished.write_text(json.dumps(asdict(constants), indent=1) + "\n", encoding="utf-8")
    return constants, residuals


def _files(given: Any) -> list[Path]:
    """Lists the files, and the JSON files of folders.

    Raises:
        ValueError: The setting is not a list of names.
    """
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"files={given!r}: give a list of files or folders, for example [benchmarks/results]")
    paths = [Path(name) for name in given]
    return [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


def _read(path: Path, shape: ModelShape) -> tuple[Measurement, ...]:
    """Reads the measurements in a file.

    Raises:
        ValueError: The file cannot be read, or see `read_measurements`.
    """
    try:
        return read_measurements(path, shape)
    except OSError as error:
        raise ValueError(
            f"files: {path}: {error.strerror or error}; give saved plans, results of benchmarks, or folders of these"
        ) from None


def _lengths(given: Any) -> list[int]:
    """Reads the sequence lengths.

    Raises:
        ValueError: The setting is not a list of lengths, or a length is too short.
    """
    if not isinstance(given, list) or not given:
        raise ValueError(f"seq_lens={given!r}: give a list of lengths, for example [4K,8K]")
    lengths = [read_length("seq_lens", each) for each in given]
    if min(lengths) < 2:
        raise ValueError(f"seq_lens contains {min(lengths)}: give lengths of at least 2 tokens")
    return lengths


def _run(
    model: Mapping[str, Any], shape: ModelShape, lengths: Sequence[int], repeats: int
) -> tuple[list[Measurement], list[str]]:
    """Measures this machine; returns the measurements and the names of its devices."""
    from lightning_memo.cli.calibration_runs import fastest_run

    measurements: list[Measurement] = []
    devices: dict[str, None] = {}
    console = Console(stderr=True)
    for number, tokens in enumerate(lengths, 1):
        progress = f"length {number} of {len(lengths)}: {shape.name}, {tokens:,} tokens, {repeats} runs"
        console.print(progress, highlight=False, soft_wrap=True)
        plan = fastest_run(model, tokens, repeats)
        devices[plan.fingerprint.device] = None
        origin = f"{shape.name}, {plan.costs.batch} x {tokens} tokens"
        measurements.append(LayerMeasurement(origin=origin, shape=shape, costs=plan.costs))
    return measurements, list(devices)


def _source(devices: Sequence[str], cluster: str) -> str:
    """Describes the origin of the constants."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    command = shlex.join(["python", "-m", "lightning_memo.estimate", "calibrate", *sys.argv[1:]])
    return (
        f"{command}: {made}, Python {platform.python_version()}, lightning_memo {__version__}, {versions}, "
        f"measured on {', '.join(devices)}. "
        f"Efficiencies are relative to the peaks of cluster {cluster}; constants that are not measured "
        "are its defaults."
    )[:2000]


def _print(constants: Constants, residuals: Sequence[Residual], output: str) -> None:
    grid = Table(title="measured and fitted")
    for name, justify in (("", "left"), ("measured", "right"), ("fitted", "right"), ("error", "right")):
        grid.add_column(name, justify=justify)  # type: ignore[arg-type]
    for r in residuals:
        grid.add_row(r.what, f"{r.measured_seconds:.4g} s", f"{r.fitted_seconds:.4g} s", f"{r.percent:+.1f} %")
    console = Console()
    console.print(grid)
    fitted = ", ".join(f"{name} {getattr(constants, name):.4g}" for name in (*EFFICIENCIES, "host_efficiency"))
    console.print(
        f"{fitted}\nSaved to {output}. Use the constants with constants={output}", highlight=False, soft_wrap=True
    )


def main() -> None:
    """Runs the calibration. A user's mistake ends it with one line on stderr and exit status 2."""

    def task(cfg: DictConfig) -> None:
        try:
            settings = plain_settings(cfg)
            constants, residuals = calibrate(settings, str(HydraConfig.get().runtime.choices.get("model")))
        except Exception as error:
            exit_for_user(error)  # before Hydra prints a message about a failed job
            raise
        _print(constants, residuals, str(settings["output"]))

    run_command(lambda: hydra.main(version_base="1.3", config_path=config_dir(), config_name="calibrate")(task)())


def read_measurements(path: Path, shape: ModelShape) -> tuple[Measurement, ...]:
    """Read a file: a plan, which every run of MemoStrategy saves, or results of `benchmarks/engine.py`.

    Args:
        path: File to read.
        shape: Model of a plan. Results of benchmarks contain their model.

    Returns:
        The measurements; none for results of other benchmarks.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON, or a plan that is invalid or of another model.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path}: not JSON: give saved plans, or results of benchmarks/engine.py") from None
    if isinstance(content, dict) and "fingerprint" in content:
        costs = Plan.load(path).costs
        origin = f"{shape.name}, {costs.batch} x {costs.tokens} tokens"
        return (LayerMeasurement(origin=origin, shape=shape, costs=costs),)
    return tuple(_steps(path, content))


def _steps(path: Path, content: Any) -> Iterator[StepMeasurement]:
    """Yields the measurements of plain training in the results of a benchmark."""
    try:
        settings = content["model"]
        seconds = [row["median_seconds"] for row in content["results"] if row["method"]["name"] == _PLAIN]
        batch, tokens = settings["batch"], settings["seq_len"]
        shape = shape_of(
            {
                "model_type": "llama",
                "num_hidden_layers": settings["layers"],
                "hidden_size": settings["hidden"],
                "intermediate_size": settings["ffn"],
                "num_attention_heads": settings["heads"],
                "num_key_value_heads": settings["kv_heads"],
                "vocab_size": settings["vocab"],
            },
            path.stem,
        )
    except (KeyError, TypeError):
        return
    for value in seconds:
        if value is not None:
            yield StepMeasurement(origin=path.stem, shape=shape, batch=batch, tokens=tokens, seconds=value)


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
    request = EstimateRequest(
        shape=shape, cluster=cluster, constants=ideal, method="memo", gpus=1, seq_len=tokens, batch_size=1
    )
    one = Parallelism()
    return layer_times(request, one), head_seconds(request, one), loss_seconds(request, one)


def _host_efficiency(layers: Sequence[LayerMeasurement], cluster: Cluster) -> float:
    copied = median(min(m.costs.offload_bytes_per_second, m.costs.prefetch_bytes_per_second) for m in layers)
    alone = cluster.host_bandwidth_of(1)
    if copied > alone:
        raise ValueError(
            f"copies ran at {copied:.3g} bytes per second, above cluster.host_bandwidth={alone:.3g}: give the "
            "host_bandwidth of the measured machine"
        )
    return copied / alone


def steady(costs: LayerCosts) -> LayerCosts:
    """Replace the times of each layer call by the median over the calls of the same sizes.

    In a first step, kernels are selected, caches are filled and pages are touched for the first time, which slows down
    single calls, above all the first. Layers of the same sizes do the same work, so the median is the time of each once
    warm, and a single cold call does not decide the plan through the overlap constraint of the slowest layer.

    Args:
        costs: Costs as measured in the first step.
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
