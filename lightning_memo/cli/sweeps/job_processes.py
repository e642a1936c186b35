"""Runs a job of a sweep as a separate command, whose processes all end when the sweep ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.run_summary import SUMMARY_FILE, RunSummary
from lightning_memo.utils.files import replacing

_SEPARATE_JOB = "LIGHTNING_MEMO_SWEEP_JOB"
_SETTINGS = Path(".hydra", "config.yaml")  # where Hydra writes the configuration of a run
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_GRACE_SECONDS = 30.0


class JobFailed(ValueError):
    """The separate command of a job failed. The message gives the reason in one line."""


def is_separate_job() -> bool:
    """Whether this process runs one job of a sweep that another process runs."""
    return _SEPARATE_JOB in os.environ


def run_separate_job(cfg: DictConfig, folder: Path) -> RunSummary:
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
