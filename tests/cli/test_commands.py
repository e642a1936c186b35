"""The command of the package, which runs the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lightning_memo import __version__
from lightning_memo.__main__ import COMMANDS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_memo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_commands_are_listed() -> None:
    for arguments in ((), ("--help",)):
        done = run(*arguments)
        assert done.returncode == 0
        assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_an_unknown_command() -> None:
    for given, near in (("trian", ": did you mean train?"), ("estimates", ": did you mean estimate?"), ("xyz", ".")):
        done = run(given)
        assert done.returncode == 2
        assert done.stderr == f"lightning-memo: {given!r} is no command{near} Commands: {', '.join(COMMANDS)}\n"


def test_the_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"lightning-memo {__version__}\n")


@pytest.mark.slow
def test_a_command_gets_its_arguments_and_gives_its_status() -> None:
    done = run("estimate", "--help")
    assert done.returncode == 0
    assert "lightning_memo.estimate" in done.stdout
    done = run("place", "no_file.csv", "out.csv")
    assert done.returncode == 2
    assert "no_file.csv" in done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("estimate", "seq_len=8K"), ("doctor",)])
def test_nobody_reads_the_output(arguments: tuple[str, ...]) -> None:
    """As with `| head`, a command whose output is not read to its end has nothing to say."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lightning_memo", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(write)
    assert (done.returncode in (1, -signal.SIGPIPE), done.stderr) == (True, "")
