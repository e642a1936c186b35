"""torchrun starts all processes again when one is killed, and they go on from the newest checkpoint exactly."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from support import warm
from support.commands import run, torchrun
from support.paths import ROOT, TESTS
from support.trainer_harness import LanguageModel, ResumableLoader, Sequences, make_trainer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves_with_path
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.cli import run_folder
from lightning_memo.profiler import measured_costs as costs

STEPS = 6


class Watch(Callback):
    """Writes each loss of the first process to a file; kills the second one once, in the fourth step, if it is to."""

    def __init__(self, log: Path, kill: bool) -> None:
        self._log = log
        self._kill = kill and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            with self._log.open("a") as file:
                file.write(f"{trainer.global_step} {module.losses[-1].hex()}\n")
        elif self._kill and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, kill: bool) -> None:
    """Train in one of two processes, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    costs._BANDWIDTH_SECONDS = 0.005  # of no interest here
    found = sorted((folder / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    saver = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        MemoStrategy(context_parallel_size=2, zero_stage=2, alpha=0.5), devices=2, max_steps=STEPS,
        callbacks=[saver, Watch(folder / "losses", kill)], enable_checkpointing=True, default_root_dir=folder,
        use_distributed_sampler=False,  # both processes share the tokens of each batch
    )  # fmt: skip
    torch.manual_seed(1)
    data = ResumableLoader(Sequences(16))
    ckpt_path = found[-1] if found else None
    trainer.fit(LanguageModel("llama"), data, ckpt_path=ckpt_path, weights_only=False)


def losses(folder: Path, kill: bool) -> list[tuple[int, str]]:
    """Steps and losses of a run of two processes."""
    folder.mkdir()
    paths = os.pathsep.join([str(ROOT), str(TESTS)])
    command = [warm.tools() / "torchrun", "--standalone", "--max-restarts=1", "--nproc_per_node=2", __file__, folder]
    # Without the last one, processes of a restart find addresses of those before (pytorch/pytorch#135712).
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [str(word) for word in (*command, int(kill))], cwd=folder, capture_output=True, text=True, timeout=240,
        check=False, env=os.environ | settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (folder / "losses").read_text().splitlines()
    return [(int(step), loss) for step, loss in map(str.split, lines)]


@pytest.mark.slow
def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    whole, restarted = losses(tmp_path / "whole", kill=False), losses(tmp_path / "restarted", kill=True)
    assert [step for step, _ in whole] == list(range(1, STEPS + 1))
    # The first process may or may not have ended its third step before torchrun ended it.
    assert [step for step, _ in restarted if step != 3] == [1, 2, 4, 5, 6]
    assert dict(restarted) == dict(whole) and set(restarted) == set(whole)


# ---- the command


class Lost(Callback):
    """Ends the second process in the fifth step of the first start: by SIGKILL, or alone as by a bug."""

    def __init__(self) -> None:
        self._first = not any(int(os.environ.get(name, "0")) for name in run_folder.COUNTS)

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if self._first and trainer.global_step == 4 and trainer.global_rank == trainer.world_size - 1:
            if trainer.world_size == 1:
                raise RuntimeError("the node is lost")
            os.kill(os.getpid(), signal.SIGKILL)


SAVING = ["trainer.max_steps=6", "callbacks.checkpoint.every_n_train_steps=2", "strategy.alpha=0.5"]
LOST = "+callbacks.lost._target_=test_elastic.Lost"
BY_STEP = ("train_loss", "val_loss", "lr", "tokens", "memo/alpha", "memo/swapped_bytes")


def metrics(folder: Path) -> list[tuple[int, str, str]]:
    """All that does not depend on the time, of `metrics.csv`, in its order."""
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), name, row[name]) for row in csv.DictReader(file) for name in BY_STEP if row[name]]


def saved(folder: Path, into: Path) -> dict[str, Any]:
    """All that the last checkpoint holds of the state of training."""
    dcp_to_torch_save(folder / "checkpoints" / "last.ckpt", into)
    state = torch.load(into, weights_only=False)
    leaves = tree_leaves_with_path({name: state[name] for name in ("state_dict", "optimizer_0")})
    return {str(path): value for path, value in leaves}


@pytest.mark.slow
def test_the_command_goes_on_in_its_folder(tmp_path: Path) -> None:
    settings = [*SAVING, "strategy.context_parallel_size=2", LOST]
    folders = {}
    for name in ("whole", "lost"):
        (tmp_path / name).mkdir()
        command = torchrun(*settings)
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": f"{ROOT}:{TESTS}:{Path(__file__).parent}"}
        if name == "whole":
            command.remove(LOST)
        status, out, err = run([command[0], "--max-restarts=1", *command[1:]], tmp_path / name, **variables)
        assert status == 0, err
        (folders[name],) = (tmp_path / name / "outputs" / "train" / "runs").iterdir()
        assert out.count("resuming from") == (name == "lost")
    whole, lost = (saved(folders[name], tmp_path / name / "state") for name in ("whole", "lost"))
    assert whole.keys() == lost.keys()
    for name, value in whole.items():
        assert torch.equal(lost[name], value) if isinstance(value, torch.Tensor) else lost[name] == value, name
    assert metrics(folders["lost"]) == metrics(folders["whole"])


ONE_TASK = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NNODES": "1", "SLURM_NODELIST": "127.0.0.1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
}  # fmt: skip


@pytest.mark.slow
def test_a_job_that_slurm_queues_again_goes_on(train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ONE_TASK.items():
        monkeypatch.setenv(name, value)
    runs = tmp_path / "outputs" / "train" / "runs"
    command = [*SAVING, LOST]
    with pytest.raises(RuntimeError, match="the node is lost"):
        train(*command)
    (lost,) = runs.iterdir()

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train(*command, "name=whole")[0] == 0  # another command of the same job
    (whole,) = (tmp_path / "outputs" / "whole" / "runs").iterdir()
    assert list(runs.iterdir()) == [lost]
    assert not run_folder.Launch(["slurm 4712"], []).was_in(lost)

    assert train(*command)[0] == 0
    assert list(runs.iterdir()) == [lost]
    assert metrics(lost) == metrics(whole)
    losses = metrics(lost)
    assert train(*command)[1].count("unigram entropy of the text") == 0, "it had come to its end"
    assert list(runs.iterdir()) == [lost] and metrics(lost) == losses

    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert not run_folder.Launch.here([]).was_in(lost), "a command that is given again begins anew"


def test_a_launch_of_torchrun_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert run_folder.Launch.here([]) is None
    names = []
    for name in ("one", "two", "none"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        launch = run_folder.Launch.here(["seed=1"])
        assert launch == run_folder.Launch.here(["seed=1"])
        launch.save(tmp_path / name)
        assert launch.was_in(tmp_path / name) and launch.resumes_in(tmp_path / name)
        assert not run_folder.Launch.here(["seed=2"]).was_in(tmp_path / name)
        names += launch.names
    assert len(set(names)) == 3 and names[2].startswith("torchrun ") and str(os.getppid()) in names[2]
    (tmp_path / "none" / "summary.json").touch()
    assert not launch.resumes_in(tmp_path / "none"), "a name that is used again, for another run of the same"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert launch.resumes_in(tmp_path / "none")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1")
