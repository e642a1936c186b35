"""Importing the package is quick, and registers the strategy whichever of it and Lightning is imported first."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from support.commands import run
from support.paths import ROOT

from lightning_memo.cli import processes

REGISTERED = "from lightning.pytorch.strategies import StrategyRegistry; print('memo' in StrategyRegistry)"
TRAINER = (
    "from lightning.pytorch import Trainer\n"
    "trainer = Trainer(strategy='memo', accelerator='cpu', devices=1, logger=False, enable_checkpointing=False)\n"
    "print(type(trainer.strategy).__name__)"
)


def fork(script: str, folder: Path) -> str:
    """Returns what a script prints in a process that has imported torch, but neither Lightning nor this package."""
    status, out, err = run(["python", "-c", script], folder, bare=True)
    assert status == 0, err
    return out


def python(*arguments: str, folder: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=600, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import lightning_memo", "import lightning.pytorch; import lightning_memo"])
def test_a_trainer_finds_the_strategy_by_its_name(tmp_path, first):
    found = fork(f"import sys\nassert 'lightning' not in sys.modules\n{first}\n{TRAINER}", tmp_path)
    assert found.split() == ["MemoStrategy"]


@pytest.mark.slow
def test_a_module_with_a_commands_name_among_its_arguments_registers_the_strategy(tmp_path):
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "__init__.py").write_text("import lightning_memo")
    (tmp_path / "user" / "check.py").write_text(REGISTERED)
    assert python("-m", "user.check", "-m", "lightning_memo.place", folder=tmp_path).split() == ["True"]


def test_the_names_of_the_package_are_there(monkeypatch):
    package = import_module("lightning_memo")
    assert package.__getattr__("MemoStrategy") is package.MemoStrategy
    assert package.__getattr__("Plan") is package.Plan
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = package.Missing


@pytest.mark.slow
def test_packages_are_attributes_and_the_package_can_be_reloaded(tmp_path):
    script = "import importlib, lightning_memo as m; print(m.callbacks.Monitor.__name__); importlib.reload(m)"
    assert fork(f"{script}\n{TRAINER}", tmp_path).split() == ["Monitor", "MemoStrategy"]


def test_a_command_collects_garbage_again_after_its_imports(monkeypatch):
    monkeypatch.setattr(processes, "_exit_on_interrupt", lambda: None)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    gc.collect()  # so that no garbage is kept
    frozen = gc.get_freeze_count()
    processes.prepare_process()
    assert not gc.isenabled()
    processes.finish_imports()
    assert gc.isenabled() and gc.get_freeze_count() > frozen
