"""Run commands as a user would, in one or several processes, with settings that make the runs small."""

from __future__ import annotations

import contextlib
import email
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_memo.cli import processes
from lightning_memo.cli.hydra_command import config_dir
from support import warm
from support.paths import ROOT, TESTS

TEXT_FOLDER = Path(email.__file__).parent
"""A folder of about thirty texts. Listing the default, the source of the standard library, takes half a second."""

TINY_RUN = (
    f"data.path={TEXT_FOLDER}",
    "data.max_bytes=100000",
    "data.seq_len=32",
    "model.config.hidden_size=16",
    "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=4",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "trainer.max_steps=5",
    "trainer.limit_val_batches=1",
    "trainer.val_check_interval=4",
    "trainer.accelerator=cpu",
    "compare_steps=1",
    "callbacks.progress_bar=null",
    "+trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
)

"""Settings that make a training run small."""
WITHOUT_REPORT = ("callbacks.report=null",)
"""Leaves out `report.html`, because drawing its curves takes longer than a small training run."""

MODULE = ["-m", "lightning_memo.train"]
HASTY_MODULE = ["-m", "support.commands"]
"""The training command, in which other processes than rank zero report a mistake after 1 second instead of 15."""
_NOT_INHERITED = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "HYDRA_FULL_ERROR")


def run(
    command: Sequence[str | Path],
    folder: Path,
    seconds: float = 600.0,
    cold: bool = False,
    bare: bool = False,
    **variables: str,
) -> tuple[int, str, str]:
    """Run a command in a folder and return its exit status, stdout and stderr. A command that hangs raises.

    Args:
        command: Words of the command. `python` and `torchrun` belong to this interpreter.
        folder: Working directory.
        seconds: Time after which the command counts as hanging.
        cold: Whether to start new interpreters, which import everything again, instead of forks of `warm`.
        bare: Whether the forks have not imported Lightning and this package yet.
        variables: Environment variables to set in addition to those of `environment`.
    """
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**environment(cold, bare), **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def environment(cold: bool = False, bare: bool = False) -> dict[str, str]:
    """Return the environment of a user's shell; see `run` for `cold` and `bare`."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    tools = Path(sys.executable).parent if cold else warm.tools(bare)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return {**inherited, "PYTHONPATH": f"{ROOT}:{TESTS}", "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PATH": path}


def lightning(*settings: str, module: Sequence[str] = MODULE) -> list[str]:
    """Return the training command with two processes, the second of which Lightning starts."""
    return ["python", *module, *TINY_RUN, *WITHOUT_REPORT, "trainer.devices=2", *settings]


def torchrun(*settings: str, report: bool = False, module: Sequence[str] = MODULE) -> list[str]:
    """Return the training command in two processes of torchrun, by default without a report."""
    tiny = TINY_RUN if report else (*TINY_RUN, *WITHOUT_REPORT)
    return ["torchrun", "--standalone", "--nproc_per_node", "2", *module, *tiny, "trainer.devices=2", *settings]


def errors(stderr: str) -> list[str]:
    """Return the lines of stderr that report a user's mistake."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def free_port() -> str:
    """Return a port that no process listens on. The system gives it to no connection by itself, unlike higher ones."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return str(port)


SWEEP = "outputs/train/sweeps/last"
"""Folder of the newest sweep of the training command."""


def python(environ: dict[str, str]) -> str | None:
    """Return the path of the interpreter that commands with this environment start."""
    return shutil.which("python", path=environ["PATH"])


def composed(name: str, *overrides: str) -> DictConfig:
    """Return a configuration of `conf/` with overrides."""
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return compose(name, list(overrides))


if __name__ == "__main__":
    from lightning_memo.train import main

    processes._DELAY_SECONDS = 1.0
    main()
