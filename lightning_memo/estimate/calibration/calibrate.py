"""Command line ``python -m lightning_memo.estimate calibrate [overrides]``: fits constants to measured runs."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_memo import __version__
from lightning_memo.cli.hydra_command import config_dir, exit_for_user, plain_settings, run_command
from lightning_memo.estimate.calibration.fitting import EFFICIENCIES, LayerMeasurement, Measurement, Residual, fit
from lightning_memo.estimate.calibration.measurements import read_measurements
from lightning_memo.estimate.inputs.constants import Constants, constants_of
from lightning_memo.estimate.inputs.presets import cluster_of, model_of
from lightning_memo.estimate.request.command_settings import read_count
from lightning_memo.shapes.model_shape import ModelShape
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import read_length


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
    base = replace(constants_of(cluster.name), program="lightning_memo")
    constants, residuals = fit(measurements, cluster, base)
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
    from lightning_memo.cli.runs.calibration_runs import fastest_run

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
