"""Command line ``python -m lightning_memo.estimate [overrides]``: one estimate, or a sweep of them with ``-m``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_memo.cli.hydra_command import (
    command_error_message,
    config_dir,
    exit_for_user,
    plain_settings,
    run_command,
)
from lightning_memo.estimate.cluster import (
    AUTO,
    MAX_DEVICES,
    Constants,
    cluster_of,
    constants_of,
    model_of,
    read_constants,
)
from lightning_memo.estimate.parallelism_search import (
    Ranking,
    Report,
    Sizes,
    longest,
    longest_with,
    nearest_counts,
    search,
)
from lightning_memo.estimate.planner_inputs import device_budget
from lightning_memo.estimate.request import Estimate, EstimateRequest, Schedule, ZeroCommunication, check_request
from lightning_memo.estimate.saved_tensors import Precision
from lightning_memo.estimate.slice_settings import Slices
from lightning_memo.estimate.sweep import JobEstimate
from lightning_memo.estimate.tables import print_answer
from lightning_memo.estimate.what_would_fit import changes_that_fit, longest_in_slices, own_slices
from lightning_memo.shapes.model_shape import ModelShape, Quantization
from lightning_memo.utils.units import parse_bytes, read_length

StreamSetting = Literal["auto", "attention", "hidden", "model"]
_MAX_COUNT: Final = 2**20
_SCHEDULE: Final = "pipeline_schedule"
SIZES: Final = ("tp", "cp", "dp", "pp", "zero_stage", "expert_parallel_size", "virtual_pipeline_size", _SCHEDULE)
"""Names of the settings in `parallel`."""

Output = Literal["table", "json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandSettings:
    """A training to estimate, and the form of the answer."""

    request: EstimateRequest
    """Its sequence length has no meaning if `longest` is set."""

    forced: Sizes
    """The settings in `parallel` that are given."""

    longest: bool
    own_slices: bool
    """Whether layers run in slices if whole layers do not fit, as training does by itself."""

    multiple_of: int
    output: Output
    alternatives: int


def read_settings(settings: Mapping[str, Any], model: str) -> CommandSettings:
    """Read the settings of `conf/estimate.yaml`.

    Args:
        settings: Settings as plain data.
        model: Name for a model without a path.

    Raises:
        ValueError: A setting is not allowed, or a file cannot be read. The message is one line with the given value,
            the allowed values and what to do.
    """
    cluster = cluster_of(settings["cluster"])
    counted = settings["gpus"]
    gpus = cluster.devices_per_node if counted == AUTO else read_count("gpus", counted, or_else=", or auto")
    if gpus not in cluster.device_counts:
        raise ValueError(
            f"gpus={gpus}: give 1 to {MAX_DEVICES}, or whole nodes of {cluster.devices_per_node} "
            "(cluster.devices_per_node) if more than one node is needed, such as "
            f"{' or '.join(map(str, nearest_counts(cluster.device_counts, gpus)))}"
        )
    longest = settings["seq_len"] == "max"
    multiple_of = read_length("multiple_of", settings["multiple_of"])
    constants = settings["constants"]
    request = EstimateRequest(
        shape=_quantized(model_of(settings["model"], model), settings["quantization"]),
        cluster=cluster,
        constants=constants_of(cluster.name) if constants is None else _constants(str(constants), cluster.name),
        method=settings["method"],
        gpus=gpus,
        seq_len=multiple_of if longest else read_length("seq_len", settings["seq_len"], ", or max"),
        batch_size=read_count("batch_size", settings["batch_size"]),
        alpha=_alpha(settings["alpha"], settings["method"]),
        precision=_choice("precision", settings["precision"], get_args(Precision)),
        zero_shard_size=_shard_size(settings["zero_shard_size"]),
        zero_communication=_choice("zero_communication", settings["zero_communication"], get_args(ZeroCommunication)),
        slices=_slices(settings),
        disk_bytes=_spill_bytes(settings["disk_memory"]),
        fused_kernels=_flag("fused_kernels", settings["fused_kernels"]),
    )
    check_request(request)
    return CommandSettings(
        request=request,
        forced=_forced(settings["parallel"]),
        longest=longest,
        own_slices=settings["slice_tokens"] == "auto",
        multiple_of=multiple_of,
        output=_choice("output", settings["output"], get_args(Output)),
        alternatives=read_count("alternatives", settings["alternatives"], least=0),
    )


def _quantized(shape: ModelShape, value: Any) -> ModelShape:
    if value is None:
        return shape
    return replace(shape, quantization=_choice("quantization", value, get_args(Quantization)))


def _constants(path: str, cluster: str) -> Constants:
    try:
        constants = read_constants(Path(path))
    except OSError as error:
        raise ValueError(f"constants={path}: {error.strerror or error}; give a file written by calibrate") from None
    if constants.cluster not in ("", cluster):
        raise ValueError(
            f"constants={path}: calibrated for cluster={constants.cluster}, not for cluster={cluster}: give "
            f"cluster={constants.cluster}, or calibrate with cluster={cluster}"
        )
    return constants


def read_count(name: str, value: Any, least: int = 1, or_else: str = "") -> int:
    """Check a setting that must be an integer, and return it.

    Raises:
        ValueError: The value is not an integer, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give an integer of at least {least}{or_else}")
    if value > _MAX_COUNT:
        raise ValueError(f"{name}={value!r}: give an integer of at most {_MAX_COUNT}")
    return value


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: give {', '.join(allowed)}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give true or false")
    return value


def _alpha(value: Any, method: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(
            f"alpha={value!r}: give a fraction of the tokens from 0 to 1, or null to let the planner choose"
        )
    if method != "memo":
        raise ValueError(f"alpha={value:g}: method={method} does not choose alpha; leave it out, or give method=memo")
    return float(value)


def _shard_size(value: Any) -> int | None:
    return None if value is None else read_count("zero_shard_size", value, least=2)


def _spill_bytes(value: Any) -> int:
    if value is None:
        return 0
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"disk_memory: {error}") from None


def _slices(settings: Mapping[str, Any]) -> Slices | None:
    """Reads the settings for slices, whose names and rules are those of `MemoStrategy`."""
    if settings["stream_from_host"] == "none":
        raise ValueError(
            "stream_from_host=none: slices whose keys and values stay on the device are not estimated; leave "
            "slice_tokens and stream_from_host out, or give stream_from_host=attention, which takes less of the device "
            "and no less time"
        )
    stream = _choice("stream_from_host", settings["stream_from_host"], get_args(StreamSetting))
    if settings["slice_tokens"] in ("auto", None):
        if stream != "auto":
            raise ValueError(
                f"stream_from_host={stream}: needs slices; give slice_tokens as well, for example slice_tokens=64K"
            )
        return None
    if settings["method"] != "memo":
        raise ValueError(
            f"slice_tokens={settings['slice_tokens']}: method={settings['method']} does not run in slices; leave "
            "slice_tokens out, or give method=memo"
        )
    tokens = read_length("slice_tokens", settings["slice_tokens"], ", auto or null")
    return Slices(tokens=tokens, stream_from_host="attention" if stream == "auto" else stream)


def _forced(settings: Any) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise ValueError(f"parallel={str(settings)[:40]}: give the sizes one by one, for example parallel.tp=4")
    for name in settings:
        if name not in SIZES:
            raise ValueError(f"parallel.{str(name)[:40]} is not a setting: give {', '.join(SIZES)}")
    forced = {name: value for name, value in settings.items() if value is not None}
    for name, value in forced.items():
        if name == _SCHEDULE:
            _choice(f"parallel.{name}", value, get_args(Schedule))
            continue
        read_count(f"parallel.{name}", value, least=0 if name == "zero_stage" else 1)
    if forced.get("zero_stage", 0) > 3:
        raise ValueError(f"parallel.zero_stage={forced['zero_stage']}: give 0 to 3, or null for the fastest")
    return forced


def answer(command: CommandSettings, progress: bool = True, changes: bool = True) -> tuple[EstimateRequest, Ranking]:
    """Finds the best parallelism, and slices and the longest sequence if the settings ask for them.

    Args:
        command: Settings of the command.
        progress: Whether to show a progress bar on stderr.
        changes: Whether to search for changes that fit if the training does not, which takes seconds.

    Returns:
        The training with its sequence length and slices, and the ranking. The best estimate also states the longest
        sequences that fit with its parallelism.

    Raises:
        ValueError: No parallelism is possible.
    """
    request, forced = command.request, command.forced
    if command.longest:
        with _progress("longest sequence", progress) as report:
            tokens = longest(request, forced, command.multiple_of, report)
        if command.own_slices:
            tokens = longest_in_slices(request, forced, command.multiple_of, above=tokens or 0) or tokens
        # If nothing fits, the answer is the reason for the shortest length that all sizes divide.
        request = replace(request, seq_len=tokens or command.multiple_of * request.gpus)
    with _progress("parallelism", progress) as report:
        ranking = search(request, forced, report)
    sliced = own_slices(request, forced) if command.own_slices and ranking.best.status != "ok" else None
    best = _with_longest(command, request, (sliced or ranking).best)
    limits = [*best.limits]
    if sliced is not None:
        limits.append(
            "Whole layers do not fit: training cuts layers by itself, or from its first step on with "
            f"{sliced.best.slices}."
        )
        request, ranking = replace(request, slices=sliced.best.slices), sliced
    elif changes and ranking.best.status != "ok":
        limits += changes_that_fit(request, forced, command.multiple_of)
    return request, replace(ranking, best=replace(best, limits=limits))


def _with_longest(command: CommandSettings, request: EstimateRequest, best: Estimate) -> Estimate:
    whole = longest_with(request, best.parallel, command.multiple_of)
    sizes = {name: getattr(best.parallel, name) for name in SIZES}
    sliced = longest_in_slices(request, sizes, command.multiple_of, above=whole or 0) if command.own_slices else None
    return replace(best, longest=whole, longest_in_slices=sliced)


@contextmanager
def _progress(what: str, progress: bool) -> Iterator[Report]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not (progress and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def run_estimate_job(cfg: DictConfig) -> JobEstimate:
    """Runs one job. A single job prints its estimate; a job of a sweep writes a file, which may hold an error."""
    job = HydraConfig.get()
    sweep = job.mode is RunMode.MULTIRUN
    try:
        command = read_settings(plain_settings(cfg), str(job.runtime.choices.get("model")))
        request, ranking = answer(command, changes=not sweep)
    except Exception as error:
        message = command_error_message(error)
        if not sweep or message is None:
            exit_for_user(error)  # before Hydra prints a message about a failed job
            raise
        failed = JobEstimate(overrides=list(job.overrides.task), longest=False, message=message)
        failed.save(Path(job.runtime.output_dir))
        return failed
    done = JobEstimate(
        overrides=list(job.overrides.task),
        longest=command.longest,
        answer=ranking.best.to_dict(),
        device_budget_bytes=device_budget(request, ranking.best.parallel).device_bytes,
    )
    if sweep:
        done.save(Path(job.runtime.output_dir))
    if command.output == "json":
        print(json.dumps(done.answer))  # noqa: T201
    elif not sweep:
        print_answer(request, ranking, command.alternatives)
    return done


def main() -> None:
    """Prints one estimate or runs a sweep. A sweep with wrong settings ends with status 1 after its report."""
    failed: list[JobEstimate] = []

    def task(cfg: DictConfig) -> None:
        done = run_estimate_job(cfg)
        if done.message:
            failed.append(done)

    run_command(lambda: hydra.main(version_base="1.3", config_path=config_dir(), config_name="estimate")(task)())
    if failed:
        raise SystemExit(1)
