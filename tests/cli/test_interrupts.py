"""Ctrl-C ends the command with one line at any time, and the interrupted run resumes exactly."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from support.commands import MODULE, TINY_RUN, environment, python, run
from support.paths import ROOT, TESTS
from typing_extensions import override

SAVING = ["callbacks.checkpoint.every_n_train_steps=2", "trainer.max_steps=6", "strategy.alpha=0.5"]


class Dying:
    """An object in whose destructor an interrupt arrives, where Python ignores exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


class Interrupt(Callback):
    """Interrupts the fourth step, either inside a destructor or in normal code."""

    def __init__(self, ignored: bool) -> None:
        self._ignored = ignored

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            if self._ignored:
                Dying()
                time.sleep(10)
            else:
                os.kill(os.getpid(), signal.SIGINT)


def losses(runs: Path) -> list[tuple[str, str]]:
    found = []
    for path in sorted(runs.glob("*/csv/metrics.csv")):
        with path.open(newline="") as file:
            found += [(row["step"], row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ignored", ["true", "false"])
def test_an_interrupt_in_a_step(train: Any, tmp_path: Path, ignored: str) -> None:
    where = ["+callbacks.interrupt._target_=test_interrupts.Interrupt", f"+callbacks.interrupt.ignored={ignored}"]
    paths = f"{ROOT}:{TESTS}:{Path(__file__).parent}"
    status, out, err = run(["python", *MODULE, *TINY_RUN, *SAVING, *where], tmp_path, PYTHONPATH=paths)
    assert status == -signal.SIGINT
    assert "Traceback" not in err and "ignored" not in err
    assert err.endswith("interrupted\n")
    checkpoint = next((tmp_path / "outputs").rglob("step-2.ckpt"))
    assert f"interrupted; to resume from {checkpoint}, run the same command with ckpt_path=last" in out
    assert train(*SAVING, "ckpt_path=last")[0] == 0
    assert train(*SAVING, "name=whole")[0] == 0
    # The third step was logged before the interrupt, and is logged again after resuming from the checkpoint.
    both, whole = (losses(tmp_path / "outputs" / name / "runs") for name in ("train", "whole"))
    assert [int(step) for step, _ in both] == [0, 1, 2, 2, 3, 4, 5]
    assert list(dict.fromkeys(both)) == whole


def test_an_interrupt_while_it_imports(tmp_path: Path) -> None:
    environ = environment(cold=True)
    command = ["python", *MODULE, *TINY_RUN]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ, executable=python(environ), stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's `&` ignores it
    )  # fmt: skip
    libraries = Path(f"/proc/{process.pid}/maps")
    while "libtorch_cpu" not in libraries.read_text():  # long after this package, long before Lightning
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.read() == "interrupted\n"
    assert process.wait() == -signal.SIGINT
