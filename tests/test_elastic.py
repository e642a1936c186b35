"""torchrun starts all processes again when one is killed, and they go on from the newest checkpoint exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import warm
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_harness import LanguageModel, ResumableLoader, Sequences, make_trainer
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.profiler import costs

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
        MemoStrategy(context_parallel_size=2, zero_stage=2, alpha=0.5, plan_memory=False), devices=2, max_steps=STEPS,
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
    paths = os.pathsep.join([str(Path(__file__).parent.parent), str(Path(__file__).parent)])
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


def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    whole, restarted = losses(tmp_path / "whole", kill=False), losses(tmp_path / "restarted", kill=True)
    assert [step for step, _ in whole] == list(range(1, STEPS + 1))
    # The first process may or may not have ended its third step before torchrun ended it.
    assert [step for step, _ in restarted if step != 3] == [1, 2, 4, 5, 6]
    assert dict(restarted) == dict(whole) and set(restarted) == set(whole)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1")
