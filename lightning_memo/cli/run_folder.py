"""The folder of a run: a summary of its settings and results, and the launch that resumes in it.

torchrun and SLURM restart a run after the loss of a process or a node. The report of a sweep reads the summaries.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from omegaconf import OmegaConf

from lightning_memo.utils.files import replacing

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Settings and results of one run. Results that were not measured are None."""

    overrides: Sequence[str]
    """Overrides of the command line, as ``name=value``."""
    status: Literal["ok", "failed"]
    message: str = ""
    """Reason for the failure, in one line."""
    processes: int = 1
    """Number of processes on all nodes. Times and sizes are of rank zero; tokens and losses are of all processes."""
    seq_len: int | None = None
    batch_size: int | None = None
    """Sequences per batch of one data-parallel process."""
    alpha: float | None = None
    """Fraction of the tokens whose activations were swapped, or None if the strategy does not swap."""
    step_seconds: float | None = None
    """Median time of an optimizer step."""
    tokens_per_second: float | None = None
    step_memory_bytes: int | None = None
    """Peak device memory of a step, gradients included, without parameters and optimizer state."""
    host_bytes: int | None = None
    """Host memory that holds swapped activations."""
    disk_bytes: int | None = None
    """Disk space that holds swapped activations for which host memory is too small."""
    arena_bytes: int | None = None
    """Size of the planned memory arena, or None if memory was not planned."""
    train_loss: float | None = None
    """Mean loss of the last steps, those before a checkpoint that was resumed included, in nats per token."""
    val_loss: float | None = None
    unigram_entropy: float | None = None
    """Lowest possible loss without context, in nats per token of the training text."""

    def save(self, folder: Path) -> None:
        """Writes the summary into a run's folder."""
        with replacing(folder / SUMMARY_FILE) as path:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RunSummary:
        """Reads what :meth:`save` wrote.

        Raises:
            OSError: The folder contains no summary.
        """
        return cls(**json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")))


class Job(Protocol):
    """A finished job of a sweep."""

    @property
    def overrides(self) -> Sequence[str]:
        """Overrides of the command line, as ``name=value``."""


def differing_settings(jobs: Sequence[Job]) -> list[str]:
    """Returns the names of the settings that differ between the jobs."""
    settings = [_settings(job) for job in jobs]
    names = dict.fromkeys(name for job in settings for name in job)
    return [name for name in names if len({job.get(name) for job in settings}) > 1]


def setting_values(job: Job, names: Sequence[str]) -> list[str]:
    """Returns the values of the named settings as written on the command line, or "-" for those that are not given."""
    settings = _settings(job)
    return [settings.get(name, "-") for name in names]


def _settings(job: Job) -> dict[str, str]:
    return dict(override.split("=", 1) for override in job.overrides)


LAUNCH_FILE = "launch.json"
COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class Launch:
    """Identifies a run across restarts, by its launchers and its command line."""

    names: Sequence[str]
    """Launchers, each with its identifier of this launch, which stays the same when it restarts the processes."""
    overrides: Sequence[str]
    """Overrides of the command line, as ``name=value``."""

    @classmethod
    def here(cls, overrides: Sequence[str]) -> Launch | None:
        """Returns the launch of this process, or None without a launcher that restarts commands."""
        names = [name for name in (_torchrun(), _slurm()) if name is not None]
        return cls(names, list(overrides)) if names else None

    def was_in(self, folder: Path) -> bool:
        """Whether the folder belongs to an earlier start of this launch."""
        path = folder / LAUNCH_FILE
        if not path.is_file():
            return False
        earlier = Launch(**json.loads(path.read_text(encoding="utf-8")))
        names = [name for name in self.names if not name.startswith("slurm") or _count("SLURM_RESTART_COUNT")]
        return earlier.overrides == self.overrides and not set(names).isdisjoint(earlier.names)

    def resumes_in(self, folder: Path) -> bool:
        """Whether this start continues the run in the folder, rather than repeating a run that has finished."""
        return self.was_in(folder) and (any(map(_count, COUNTS)) or not (folder / SUMMARY_FILE).is_file())

    def save(self, folder: Path) -> None:
        """Records in the folder that it belongs to this launch."""
        with replacing(folder / LAUNCH_FILE) as path:
            path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def register_run_folder() -> None:
    """Registers ``${run_folder:RUNS,NEW}``: the folder in RUNS that this launch resumes, otherwise RUNS/NEW.

    A new run gets a folder of its own: RUNS/NEW-2 if another one began in the same second.
    """
    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)


def _run_folder(runs: str, new: str, *, _root_: Any) -> str:
    launch = Launch.here(_root_.hydra.overrides.task)
    if launch is not None:
        newest_first = sorted(Path(runs).glob(f"*/{LAUNCH_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest_first:
            if launch.resumes_in(path.parent):
                return str(path.parent)
    return _new_folder(runs, new)


@functools.cache  # Hydra asks several times
def _new_folder(runs: str, new: str) -> str:
    """Creates RUNS/NEW, or the first of RUNS/NEW-2, RUNS/NEW-3, ... that no other run has created."""
    for name in itertools.chain([new], (f"{new}-{number}" for number in itertools.count(2))):
        try:
            Path(runs).mkdir(parents=True, exist_ok=True)
            Path(runs, name).mkdir()
        except FileExistsError:
            if Path(runs).is_dir():
                continue
        except OSError:
            pass  # OmegaConf would hide the error, which Hydra reports when it needs the folder
        return str(Path(runs, name))
    raise AssertionError("the names have no end")


def _torchrun() -> str | None:
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name == "none":  # torchrun's default name; torchrun is the parent of this process
        # The 22nd field is the start time. The second field is a name in parentheses, which may contain spaces.
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        name = f"{socket.gethostname()}.{os.getppid()}.{started}"
    return None if name is None else f"torchrun {name}"


def _slurm() -> str | None:
    job = os.environ.get("SLURM_JOB_ID")
    return None if job is None else f"slurm {job}"


def _count(name: str) -> int:
    return int(os.environ.get(name, "0"))
