"""A run that is killed at any moment goes on from its newest checkpoint with the very same losses."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.draws import draws
from support.processes import forking
from support.trainer_harness import LanguageModel, ResumableLoader, Sequences, fit, shorten_measurements
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.profiler import measured_costs as costs

KILLS = draws(6)
STEPS = 12


class Writing(LanguageModel):
    """Appends each loss to a file at once."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    @override
    def keep(self, loss: torch.Tensor) -> torch.Tensor:
        with self._log.open("a") as file:
            file.write(f"{self.trainer.global_step} {loss.item().hex()}\n")
        return super().keep(loss)


def train(folder: Path, checkpoint: Path | None) -> None:
    """Train to the end, from the start or a checkpoint, with a checkpoint every other step."""
    torch.set_num_threads(1)
    costs._BANDWIDTH_SECONDS = 0.005  # of no interest here
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    saver = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(
        MemoStrategy(alpha=0.5), Writing(folder / "losses"), ResumableLoader(Sequences(14)), max_steps=STEPS,
        callbacks=[saver], enable_checkpointing=True, ckpt_path=checkpoint, default_root_dir=folder,
    )  # fmt: skip


def train_until_killed(folder: Path, checkpoint: Path | None, losses: int, seconds: float) -> bool:
    """Train in a process of its own that is killed some time after so many more losses; whether it was by then over."""
    log = folder / "losses"
    enough = len(losses_of(log)) + losses
    process = forking().Process(target=train, args=(folder, checkpoint), daemon=True)
    process.start()
    while process.is_alive() and len(losses_of(log)) < enough:
        time.sleep(0.002)
    time.sleep(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def losses_of(log: Path) -> list[tuple[int, str]]:
    """Steps and losses that were written, without a line that was cut short."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint that can be read, if there is one."""
    found = sorted(folder.glob("*.ckpt"), key=step_of, reverse=True)
    return next((path for path in found if is_complete(path)), None)


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.stem.split("=")[1]) if checkpoint else 0


def is_complete(checkpoint: Path) -> bool:
    try:
        return bool(torch.load(checkpoint, weights_only=False))
    except Exception:
        return False


def test_kills_at_random_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every process goes on where the newest checkpoint was, and every loss is the uninterrupted run's."""
    shorten_measurements(monkeypatch)
    monkeypatch.chdir(tmp_path)
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    whole = fit(MemoStrategy(alpha=0.5), data=ResumableLoader(Sequences(14)), max_steps=STEPS)
    expected = {step: loss.hex() for step, loss in enumerate(whole.losses)}
    kills = runs = resumed = 0
    while kills < KILLS or resumed < KILLS // 5:  # a kill may come before the first step of a resumed run
        folder = tmp_path / f"run {runs}"
        folder.mkdir(exist_ok=True)
        checkpoint = newest_complete(folder / "saved")
        before = len(losses_of(folder / "losses"))
        over = train_until_killed(folder, checkpoint, chance.randint(0, 4), chance.uniform(0.0, 0.03))
        written = losses_of(folder / "losses")[before:]
        assert set(written) <= set(expected.items()), f"seed {seed}"
        stop = step_of(checkpoint) + len(written)
        assert [step for step, _ in written] == list(range(step_of(checkpoint), stop)), f"seed {seed}"
        kills, runs = kills + (not over), runs + (over or stop == STEPS)
        resumed += bool(checkpoint and written)
