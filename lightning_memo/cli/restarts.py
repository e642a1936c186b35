"""A command that torchrun or SLURM starts again, after a process or a node was lost, goes on in the folder it had."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_memo.cli.run_summary import FILE_NAME as SUMMARY
from lightning_memo.utils.files import replacing

FILE_NAME = "launch.json"
COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class Launch:
    """What makes two starts of a command the same run: who started it, and what it is told to do."""

    names: Sequence[str]
    """Of the launchers, each with its number for this launch, the same whenever it starts the processes again."""
    overrides: Sequence[str]
    """What the command line changes, as ``name=value``."""

    @classmethod
    def here(cls, overrides: Sequence[str]) -> Launch | None:
        """That of this process; None where nobody starts commands again."""
        names = [name for name in (_torchrun(), _slurm()) if name is not None]
        return cls(names, list(overrides)) if names else None

    def was_in(self, folder: Path) -> bool:
        """Whether an earlier start of this launch left the folder behind."""
        path = folder / FILE_NAME
        if not path.is_file():
            return False
        earlier = Launch(**json.loads(path.read_text(encoding="utf-8")))
        names = [name for name in self.names if not name.startswith("slurm") or _count("SLURM_RESTART_COUNT")]
        return earlier.overrides == self.overrides and not set(names).isdisjoint(earlier.names)

    def goes_on_in(self, folder: Path) -> bool:
        """Whether the folder is that of an earlier start, and not of one that came to its end and is asked for anew."""
        return self.was_in(folder) and (any(map(_count, COUNTS)) or not (folder / SUMMARY).is_file())

    def save(self, folder: Path) -> None:
        """Writes down whose folder it is."""
        with replacing(folder / FILE_NAME) as path:
            path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def use_run_folder() -> None:
    """Lets configurations say ``${run_folder:RUNS,NEW}``: the folder in RUNS of this very launch, else the one NEW."""
    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)


def _run_folder(runs: str, new: str, *, _root_: Any) -> str:
    launch = Launch.here(_root_.hydra.overrides.task)
    if launch is not None:
        newest_first = sorted(Path(runs).glob(f"*/{FILE_NAME}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest_first:
            if launch.goes_on_in(path.parent):
                return str(path.parent)
    return str(Path(runs, new))


def _torchrun() -> str | None:
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name == "none":  # torchrun's own word where nobody named the run; it is this process's parent
        # The 22nd field, when it started; the second one is a name in parentheses.
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        name = f"{socket.gethostname()}.{os.getppid()}.{started}"
    return None if name is None else f"torchrun {name}"


def _slurm() -> str | None:
    job = os.environ.get("SLURM_JOB_ID")
    return None if job is None else f"slurm {job}"


def _count(name: str) -> int:
    return int(os.environ.get(name, "0"))
