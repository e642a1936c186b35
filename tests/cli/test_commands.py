"""The command of the package, which runs the others."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    done = run("trian")
    assert done.returncode == 2
    assert done.stderr == f"lightning-memo: 'trian' is no command: give {', '.join(COMMANDS)}\n"


@pytest.mark.slow
def test_a_command_gets_its_arguments_and_gives_its_status() -> None:
    done = run("estimate", "--help")
    assert done.returncode == 0
    assert "lightning_memo.estimate" in done.stdout
    done = run("place", "no_file.csv", "out.csv")
    assert done.returncode == 2
    assert "no_file.csv" in done.stderr
