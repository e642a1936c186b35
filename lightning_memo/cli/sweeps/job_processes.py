"""A job of a sweep in processes of its own, which all end when the sweep does."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.run_summary import FILE_NAME, RunSummary
from lightning_memo.utils.files import replacing

_APART = "LIGHTNING_MEMO_SWEEP_JOB"
_SETTINGS = Path(".hydra", "config.yaml")  # where Hydra writes them
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_LAST_WORDS_SECONDS = 30.0


class JobFailed(ValueError):
    """A job's own processes failed; the message says why in one line."""


def is_apart() -> bool:
    """Whether this process runs one job for a sweep that another process runs."""
    return _APART in os.environ


def run_apart(cfg: DictConfig, folder: Path) -> RunSummary:
    """Runs a job as a command of its own, which starts as many processes as it needs.

    They are told to end when this process ends, however it ends.

    Args:
        cfg: Of the job.
        folder: That it has to itself.

    Raises:
        ValueError: It needs several nodes.
        JobFailed: It failed.
    """
    if cfg.trainer.num_nodes > 1:
        raise ValueError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: the jobs of a sweep run on one node, or by "
            "hydra/launcher=slurm; see docs/sweeps.md"
        )
    with replacing(folder / _SETTINGS) as path:
        OmegaConf.save(cfg, path)
    (folder / FILE_NAME).unlink(missing_ok=True)
    settings = ["--config-path", str(folder / _SETTINGS.parent), "--config-name", _SETTINGS.stem]
    command = [sys.executable, "-m", "lightning_memo.train", *settings, f"hydra.run.dir={_quoted(folder)}"]
    prctl = ctypes.CDLL(None).prctl  # found before the fork: little is safe after it
    process = subprocess.Popen(
        command, env={**os.environ, _APART: "1"}, preexec_fn=lambda: prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    )
    try:
        status = process.wait()
    except BaseException:
        _end(process)
        raise
    if not (folder / FILE_NAME).is_file():
        raise JobFailed(f"its processes ended with status {status}; what they printed says why")
    summary = RunSummary.load(folder)
    if summary.status == "failed":
        raise JobFailed(summary.message)
    return summary


def _quoted(path: Path) -> str:
    """As a value of Hydra's command line."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_LAST_WORDS_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
