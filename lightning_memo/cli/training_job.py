"""One training run, started alone or as a job of a sweep, including runs that were interrupted before."""

from __future__ import annotations

import csv
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_memo.cli.build_run import build_trainer, count_processes, quiet
from lightning_memo.cli.hydra_command import command_error_message, exit_for_user
from lightning_memo.cli.processes import computed_on_rank_zero, delay_unless_rank_zero, started_processes
from lightning_memo.cli.run_folder import SUMMARY_FILE, Launch, RunSummary
from lightning_memo.utils.files import explained, replacing
from lightning_memo.utils.process import is_rank_zero
from lightning_memo.utils.units import read_length

log = logging.getLogger(__name__)
Train = Callable[[DictConfig], RunSummary]
_SEPARATE_JOB = "LIGHTNING_MEMO_SWEEP_JOB"
_SETTINGS = Path(".hydra", "config.yaml")  # where Hydra writes the configuration of a run
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_GRACE_SECONDS = 30.0


class JobFailed(ValueError):
    """The separate command of a job failed. The message gives the reason in one line."""


def run_training_job(cfg: DictConfig, train: Train) -> RunSummary:
    """Trains, and writes the summary in rank zero. A failed job of a sweep has a summary too, and the sweep continues.

    Args:
        cfg: Composed configuration.
        train: Function that trains as configured.
    """
    job = HydraConfig.get()
    output_dir = Path(job.runtime.output_dir)
    overrides = [override for override in job.overrides.task if not override.startswith("sweep=")]
    sweep = job.mode is RunMode.MULTIRUN
    try:
        if not sweep and len(overrides) < len(job.overrides.task):
            raise ValueError("sweep=...: give -m as well; to resume a single run, give ckpt_path=last")
        with explained(output_dir):  # the files of loggers as well
            summary = replace(resume_or_run(cfg, output_dir, overrides, train), overrides=overrides)
    except Exception as error:
        if not (sweep or is_separate_job()):
            exit_for_user(error)
            raise
        delay_unless_rank_zero()
        summary = _failure(cfg, overrides, error)
        log.error("job failed: %s", summary.message, exc_info=error if command_error_message(error) is None else None)
    except BaseException:
        if sweep:
            log.warning(
                "interrupted; to continue the sweep, run the same command with sweep=%s", output_dir.parent.name
            )
        elif (newest := _own_checkpoint(cfg)) is not None and is_rank_zero():
            log.warning("interrupted; to resume from %s, run the same command with ckpt_path=last", newest)
        raise
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    if is_rank_zero():
        summary.save(output_dir)
    return summary


def resume_or_run(cfg: DictConfig, folder: Path, overrides: list[str], train: Train) -> RunSummary:
    """Runs a job, or resumes it from its newest checkpoint if an earlier start was interrupted.

    A job that has finished before is not repeated. If a job of a sweep needs several processes, a separate command
    starts them, unless a launcher has already started them.

    Args:
        cfg: Configuration of the job.
        folder: Folder of the job.
        overrides: Overrides of the command line.
        train: Function that trains as configured.

    Raises:
        ValueError: A setting is not allowed, or data or a checkpoint is missing.
        JobFailed: The separate command failed.
    """
    sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    finished, checkpoint = computed_on_rank_zero(
        lambda: _earlier_results(cfg, folder, None if sweep else Launch.here(overrides))
    )
    if finished is not None:
        log.info("already finished: %s", folder)
        return RunSummary(**finished)
    merged = OmegaConf.merge(cfg, {"ckpt_path": checkpoint})
    assert isinstance(merged, DictConfig)
    cfg = merged
    if sweep and started_processes() is None:
        with quiet():
            processes = count_processes(build_trainer(cfg))
        if processes > 1:
            return _run_separate_job(cfg, folder)
    return train(cfg)


def _earlier_results(cfg: DictConfig, folder: Path, launch: Launch | None) -> list[Any]:
    """Returns the fields of the summary of a job that has finished, and the checkpoint to start or resume from.

    The contents of the job's folder are used only in a sweep, whose folders are numbered, and after a restart of the
    same launch.
    """
    own = launch is None and HydraConfig.get().mode is RunMode.MULTIRUN
    if launch is not None:
        own = launch.resumes_in(folder)
        if is_rank_zero():
            launch.save(folder)
    finished = _finished_job(folder) if own else None
    newest = _own_checkpoint(cfg) if own else None
    if newest is not None:
        log.info("resuming from %s", newest)
    return [None if finished is None else asdict(finished), newest or _checkpoint_to_resume(cfg)]


def _finished_job(folder: Path) -> RunSummary | None:
    """Returns the summary of a job that has finished successfully, otherwise None."""
    if not (folder / SUMMARY_FILE).is_file():
        return None
    summary = RunSummary.load(folder)
    return summary if summary.status == "ok" else None


def _own_checkpoint(cfg: DictConfig) -> str | None:
    return _newest_checkpoint(Path(cfg.paths.checkpoint_dir).glob("*.ckpt"))


def _checkpoint_to_resume(cfg: DictConfig) -> str | None:
    """Returns the checkpoint in ``ckpt_path``; ``last`` is the newest checkpoint of all runs with the same name.

    Raises:
        ValueError: The checkpoint does not exist.
    """
    if cfg.ckpt_path is None:
        return None
    if cfg.ckpt_path != "last":
        if not Path(cfg.ckpt_path).exists():
            raise ValueError(f"ckpt_path={cfg.ckpt_path}: no such checkpoint; give the path of a checkpoint, or last")
        return str(cfg.ckpt_path)
    runs = Path(cfg.paths.root) / cfg.name / "runs"
    found = _newest_checkpoint(runs.glob("*/checkpoints/*.ckpt"))
    if found is None:
        raise ValueError(f"ckpt_path=last: no checkpoint in {runs}; give a path, or the name=... of an earlier run")
    return found


def _newest_checkpoint(paths: Iterable[Path]) -> str | None:
    """Returns the newest complete checkpoint, or None. Warns of incomplete ones.

    Args:
        paths: Checkpoint files, checkpoint folders of several processes, and links to them. If a run was killed while
            saving, its link may be broken and its file incomplete.
    """
    there = {path.resolve() for path in paths if path.exists()}
    complete = [path for path in there if path.is_dir() or zipfile.is_zipfile(path)]
    for path in sorted(there.difference(complete)):
        rank_zero_warn(f"{path}: incomplete checkpoint, skipped")
    newest = max(complete, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else str(newest)


def _failure(cfg: DictConfig, overrides: list[str], error: Exception) -> RunSummary:
    message = command_error_message(error) or " ".join(f"{type(error).__name__}: {error}".split())
    try:
        seq_len = read_length("seq_len", OmegaConf.select(cfg, "data.seq_len"))
    except ValueError:  # possibly the reason for the failure
        seq_len = None
    batch_size = OmegaConf.select(cfg, "data.batch_size")
    return RunSummary(overrides=overrides, status="failed", message=message, seq_len=seq_len, batch_size=batch_size)


def is_separate_job() -> bool:
    """Whether this process runs one job of a sweep that another process runs."""
    return _SEPARATE_JOB in os.environ


def _run_separate_job(cfg: DictConfig, folder: Path) -> RunSummary:
    """Runs a job as a separate command, which starts as many processes as the job needs.

    The processes end when this process ends, even if it is killed.

    Args:
        cfg: Configuration of the job.
        folder: Folder of the job.

    Raises:
        ValueError: The job needs several nodes.
        JobFailed: The job failed.
    """
    if cfg.trainer.num_nodes > 1:
        raise ValueError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: jobs of a sweep run on one node, unless they are "
            "started with hydra/launcher=slurm; see docs/sweeps.md"
        )
    with replacing(folder / _SETTINGS) as path:
        OmegaConf.save(cfg, path)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    settings = ["--config-path", str(folder / _SETTINGS.parent), "--config-name", _SETTINGS.stem]
    command = [sys.executable, "-m", "lightning_memo.train", *settings, f"hydra.run.dir={_quoted(folder)}"]
    prctl = ctypes.CDLL(None).prctl  # loaded before the fork, because little is safe between fork and exec
    process = subprocess.Popen(
        command, env={**os.environ, _SEPARATE_JOB: "1"}, preexec_fn=lambda: prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    )
    try:
        status = process.wait()
    except BaseException:
        _end(process)
        raise
    if not (folder / SUMMARY_FILE).is_file():
        raise JobFailed(f"its processes ended with status {status}; see their output for the reason")
    summary = RunSummary.load(folder)
    if summary.status == "failed":
        raise JobFailed(summary.message)
    return summary


def _quoted(path: Path) -> str:
    """The path quoted as a value of Hydra's command line."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class EarlierMetrics(Callback):
    """Restores the rows of `metrics.csv` up to the checkpoint, because Lightning's logger starts with an empty file.

    Attributes:
        rows: Rows that were read, by the folder of the file.
        last: The last value of each metric that was restored.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, str]]] = {}
        self.last: dict[str, float] = {}

    def read(self, loggers: Sequence[Logger]) -> None:
        """Reads the rows of earlier runs. Must be called before anything is logged."""
        for logger in loggers:
            if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir, "metrics.csv")).is_file():
                with path.open(newline="") as file:
                    # Lightning's logger writes rows twice if an interrupt occurs between writing and clearing them.
                    once = dict.fromkeys(tuple(row.items()) for row in csv.DictReader(file))
                    self.rows[logger.log_dir] = [dict(row) for row in once]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            for row in _until(trainer.global_step, self.rows.pop(str(logger.log_dir), [])):
                metrics = {name: _number(text) for name, text in row.items() if text}
                self.last.update(metrics)
                logger.log_metrics(metrics, int(metrics.pop("step")))


def _until(global_step: int, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the rows that were logged before the checkpoint. Later rows will be logged again.

    Lightning counts steps from 0, while callbacks log the number of finished steps. Of the rows with the number of the
    checkpoint, those before the last row with a smaller number are from a callback.
    """
    steps = [int(row["step"]) for row in rows]
    end = max((place for place, step in enumerate(steps, 1) if step < global_step), default=0)
    return [row for row, step in zip(rows[:end], steps, strict=False) if step <= global_step]


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
