"""SIGTERM ends a step before it is over, or all processes after the same step, and the run goes on from there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.commands import environment, free_port, lightning, torchrun
from support.draws import REPEATABLE, draws
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.processes import forking
from support.trainer_harness import TOKENS, LanguageModel, Sequences, copy_threads, forwards, make_trainer
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy
from lightning_memo.callbacks import end_on_sigterm
from lightning_memo.data.resumable_loader import SequenceDataset
from lightning_memo.data.text_module import Loaded, SequenceDataModule
from lightning_memo.parallel.sharded_checkpoint import load_sharded
from lightning_memo.profiler import measured_costs as costs

LAYERS = 6
STEPS = 6
MANY_LAYERS = 20
SIGNALLED = MANY_LAYERS + 15  # calls of layers: in the second step, as some calls of the first one are trials


class Act(torch.autograd.Function):
    """Calls a function in its forward, and another in its backward."""

    @staticmethod
    def forward(ctx, x, begin, end):
        ctx.end = end
        begin()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.end()
        return dx, None, None


class Watched(PlainBlock):
    """A block that calls `begin` before its forward and `end` in its backward."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(dropout=0.2)
        self._begin, self._end = begin, end

    def forward(self, x: Tensor) -> Tensor:
        return Act.apply(super().forward(x), self._begin, self._end)


class Killed:
    """Layers of which one sends SIGTERM to its own process, in the forward or the backward of a step."""

    def __init__(self, place: str, step: int) -> None:
        self.place, self.step = place, step
        self.passed: list[tuple[str, int]] = []
        self.module = LanguageModel(self._build)

    def _build(self) -> nn.Module:
        blocks = []
        for number in range(LAYERS):
            calls = [self._at(place, number) for place in ("forward", "backward")]
            blocks.append(Watched(*calls))
        return PlainModel(blocks)

    def _at(self, place: str, number: int) -> Callable[[], None]:
        def call() -> None:
            if self.module.trainer.global_step == self.step:
                self.passed.append((place, number))
                if (place, number) == (self.place, 3):
                    os.kill(os.getpid(), signal.SIGTERM)

        return call


class Repeats(SequenceDataset):
    """The sequences of `trainer_harness`."""

    def __init__(self) -> None:
        self._sequences = Sequences(14)

    @property
    def tokens(self) -> int:
        return len(self) * TOKENS

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._sequences[index]


class Data(SequenceDataModule):
    def __init__(self) -> None:
        super().__init__(seq_len=TOKENS, batch_size=2, seed=3, num_workers=0)

    def load(self) -> Loaded:
        return Loaded(Repeats(), Repeats(), VOCABULARY, 1.0)


def train(folder: Path, module: LanguageModel, alpha: float, ckpt_path: Path | None = None) -> None:
    saver = ModelCheckpoint(folder, "stopped", every_n_train_steps=100, save_on_exception=True)
    trainer = make_trainer(
        MemoStrategy(alpha=alpha), max_steps=STEPS, callbacks=[saver], enable_checkpointing=True,
        default_root_dir=folder, limit_val_batches=0,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path, weights_only=False)


@slow_if(lambda place, alpha: (place, alpha) != ("forward", 0.5))
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_the_step_ends_after_the_layer_and_is_run_again(tmp_path: Path, place: str, alpha: float) -> None:
    whole, killed, resumed = (Killed(place, step) for step in (-1, 2, -1))  # in step 4, a layer is compared
    train(tmp_path, whole.module, alpha)
    with pytest.raises(SIGTERMException):
        train(tmp_path, killed.module, alpha)
    assert killed.passed[-1] == (place, 3)
    assert forwards(killed.module) == [] and copy_threads() == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(tmp_path, resumed.module, alpha, tmp_path / "stopped.ckpt")
    assert killed.module.losses[:2] + resumed.module.losses == whole.module.losses
    assert all(torch.equal(a, b) for a, b in zip(resumed.module.parameters(), whole.module.parameters(), strict=True))


def train_slowly(folder: Path) -> None:
    """Train so that the signal arrives in a layer of the second step, which waits for it; each notes that it begins."""
    torch.set_num_threads(1)
    costs._BANDWIDTH_SECONDS = 0.005  # of no interest here
    begun = folder / "layers"

    def begin() -> None:
        with begun.open("a") as file:
            file.write(".")
        while begun.stat().st_size == SIGNALLED and not module.trainer.received_sigterm:
            time.sleep(0.01)

    blocks = [Watched(begin, lambda: None) for _ in range(MANY_LAYERS)]
    module = LanguageModel(lambda: PlainModel(blocks))
    train(folder, module, alpha=1.0)


@pytest.mark.slow
def test_a_process_ends_within_a_layer(tmp_path: Path) -> None:
    process = forking().Process(target=train_slowly, args=(tmp_path,), daemon=True)
    process.start()
    layers = tmp_path / "layers"
    while process.is_alive() and (not layers.exists() or layers.stat().st_size < SIGNALLED):
        time.sleep(0.01)
    process.terminate()
    process.join()
    assert process.exitcode == 0  # as Lightning ends
    assert layers.stat().st_size <= SIGNALLED + 1
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=False)
    assert saved["global_step"] == 1


# ---- several processes

GRACE_SECONDS = 3.0
LIMIT_SECONDS = 30.0  # of launchers, after which they kill


class Noting(LanguageModel):
    """Creates a file RANK.EVENT for events of the run, and lets a rank wait after one of them.

    It waits forever, or fails once it is asked to end, as it does when the workers of its data loader are gone.
    """

    def __init__(self, folder: Path, stalls: tuple[int, str] | None) -> None:
        super().__init__("llama")
        self._folder, self._stalls = folder, stalls

    def note(self, event: str) -> None:
        rank = int(os.environ["RANK"])
        (self._folder / f"{rank}.{event}").touch()
        while (rank, event) == self._stalls:
            time.sleep(0.1)
        while (rank, f"{event} fails") == self._stalls:
            time.sleep(0.1)
            if self.trainer.strategy._sigterm.together.asked:
                raise ZeroDivisionError("lost a worker")

    def setup(self, stage: str) -> None:
        self.note("setup")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.note(f"step {self.trainer.global_step}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.note(f"validation {batch_idx}")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.note(f"test {batch_idx}")
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.note(f"predict {batch_idx}")
        return super().predict_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        self.note("saving")
        super().on_save_checkpoint(checkpoint)


class Endless(Sequences):
    def __init__(self) -> None:
        super().__init__(64)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index % 64)


def run_as_rank(
    rank: int, size: int, port: str, folder: Path, loop: str, settings: dict[str, int], stalls: tuple[int, str] | None
) -> None:
    """Run a loop that never ends, as one of the processes that a launcher has started."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0", TORCHELASTIC_RUN_ID="tests",
    )  # fmt: skip
    torch.set_num_threads(1)
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    costs._BANDWIDTH_SECONDS = 0.005  # of no interest here
    end_on_sigterm._GRACE_SECONDS = GRACE_SECONDS
    saver = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=3, save_top_k=2, monitor="step", mode="max")
    stopped = ModelCheckpoint(folder / "saved", "stopped", every_n_train_steps=10**6, save_on_exception=True)
    trainer = make_trainer(
        MemoStrategy(**settings), devices=size, max_steps=-1, callbacks=[saver, stopped],
        enable_checkpointing=True, default_root_dir=folder, val_check_interval=5, limit_val_batches=5,
        max_epochs=-1, num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    torch.manual_seed(1)
    data = DataLoader(Endless(), batch_size=2)
    loops = {"fit": lambda m: trainer.fit(m, data, data), "test": trainer.test, "predict": trainer.predict}
    module = Noting(folder, stalls)
    loops[loop](module) if loop == "fit" else loops[loop](module, data)


class Ranks:
    """The processes of a run, of which one gets SIGTERM."""

    def __init__(
        self, folder: Path, size: int = 2, loop: str = "fit", stalls: tuple[int, str] | None = None, **settings: int
    ) -> None:
        self.folder, self.size = folder, size
        folder.mkdir(exist_ok=True)
        port = free_port()
        arguments = [(rank, size, port, folder, loop, settings, stalls) for rank in range(size)]
        self._processes = [forking().Process(target=run_as_rank, args=args, daemon=True) for args in arguments]
        for process in self._processes:
            process.start()

    def wait_for(self, *notes: str) -> None:
        deadline = time.monotonic() + 120.0
        while not all((self.folder / note).exists() for note in notes):
            assert all(process.is_alive() for process in self._processes), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def end(self, rank: int, *others: int) -> float:
        """Send SIGTERM to ranks, and return how long it takes until all have ended as they have to."""
        began = time.monotonic()
        assert all(process.is_alive() for process in self._processes), self.output()
        for each in (rank, *others):
            os.kill(self._processes[each].pid, signal.SIGTERM)
        for process in self._processes:
            process.join(max(began + LIMIT_SECONDS - time.monotonic(), 0.1))
        statuses = [process.exitcode for process in self._processes]
        for process in self._processes:
            process.kill()
        assert statuses == [143] * self.size, self.output()
        return time.monotonic() - began

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.output")))

    def checkpoints(self) -> dict[str, int]:
        """The steps of all checkpoints, each of which is whole."""
        module = LanguageModel("llama")
        found = {}
        for path in (self.folder / "saved").glob("*.ckpt"):
            found[path.stem] = load_sharded(path, module, weights_only=False)["global_step"]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["fit", "test", "predict"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_after_the_same_batch(tmp_path: Path, loop: str, rank: int) -> None:
    ranks = Ranks(tmp_path, loop=loop)
    ranks.wait_for("0.step 2" if loop == "fit" else f"0.{loop} 2")
    assert ranks.end(rank) < LIMIT_SECONDS
    if loop == "fit":
        notes = [{path.suffix for path in tmp_path.glob(f"{each}.*") if "output" not in path.name} for each in (0, 1)]
        assert notes[0] == notes[1]
        steps = max(int(note.split()[1]) for note in notes[0] if note.startswith(".step"))
        assert ranks.checkpoints()["stopped"] == steps + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stalls", "rank"),
    [((0, "setup"), 1), ((1, "step 2"), 0), ((0, "step 0"), 0), ((1, "validation 1"), 1), ((0, "saving"), 1)],
    ids=["setup", "step", "first step", "validation", "saving"],
)
def test_a_rank_that_the_others_wait_for(tmp_path: Path, stalls: tuple[int, str], rank: int) -> None:
    """They wait in a collective, and the step does not end in time."""
    ranks = Ranks(tmp_path, stalls=stalls)
    ranks.wait_for(f"{stalls[0]}.{stalls[1]}")
    time.sleep(0.5)
    seconds = ranks.end(rank)
    assert seconds < GRACE_SECONDS + 5.0
    assert all(step % 3 == 0 for step in ranks.checkpoints().values())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_meanwhile_ends_all_at_once(tmp_path: Path, rank: int) -> None:
    ranks = Ranks(tmp_path, stalls=(1, "step 4 fails"))
    ranks.wait_for("1.step 4")
    ranks.end(rank)
    assert ranks.output().count("SIGTERM ends this process before the end of the batch: lost a worker") == 1
    assert ranks.checkpoints() == {"step=3": 3}


@pytest.mark.slow
def test_sigterm_to_all_ranks_before_they_meet(tmp_path: Path) -> None:
    """As torchrun and SLURM send it. The first rank waits for the other."""
    ranks = Ranks(tmp_path)
    time.sleep(0.3)
    statuses = [ranks._processes[0], ranks._processes[1]]
    for process in statuses:
        os.kill(process.pid, signal.SIGTERM)
    for process in statuses:
        process.join(LIMIT_SECONDS)
    assert all(process.exitcode in (143, -signal.SIGTERM) for process in statuses)  # shells report both alike


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_random_moments(tmp_path: Path, size: int) -> None:
    seed = 1 if REPEATABLE else random.SystemRandom().randrange(2**32)
    chance, took = random.Random(seed), []
    for number in range(draws(2)):
        settings = chance.choice([{}, {"zero_stage": 3}, {"context_parallel_size": 2}, {"zero_stage": 1}])
        ranks = Ranks(tmp_path / str(number), size, **settings)
        ranks.wait_for(*(f"{rank}.setup" for rank in range(size)))
        time.sleep(chance.uniform(0.0, 6.0))
        took.append(ranks.end(*chance.sample(range(size), chance.choice([1, 1, 2]))))
        ranks.checkpoints()
    print(f"{len(took)} of {len(took)} ended with status 143 within {max(took):.1f} s (seed {seed})")  # noqa: T201


def lose_a_process(port: int, status: int) -> None:
    """Reach the last step, and wait for a process that this one has started, as for its part of a checkpoint."""
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
    code = f"{ignores}import os, sys; sys.stdin.read(); os._exit({status})"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    together = end_on_sigterm.EndTogether([child])
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    together.join(store, 0, 1)
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGTERM)
    while not together.ends_here():
        time.sleep(0.01)
    time.sleep(0.5)
    child.stdin.close()  # the child ends by that
    child.wait()
    time.sleep(2.0 if status == 143 else 30.0)
    together.close()
    os._exit(9)


@pytest.mark.slow
@pytest.mark.parametrize(("status", "expected"), [(1, 143), (143, 9)])
def test_a_process_that_is_lost_after_the_last_step(status: int, expected: int) -> None:
    """Its launcher does not wait for it; one that ends as it should is waited for by others."""
    process = forking().Process(target=lose_a_process, args=(int(free_port()), status))
    process.start()
    process.join(20.0)
    assert process.exitcode == expected


def test_the_signal_of_a_forked_worker_is_its_own(tmp_path: Path) -> None:
    """A worker of a data loader has the handlers of the process, and is ended by SIGTERM when an epoch ends."""
    watch = end_on_sigterm.EndTogether([])
    earlier = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)
        assert watch._thread.is_alive()  # it would have ended this process
    finally:
        watch.close()
        signal.signal(signal.SIGTERM, earlier)
    assert not watch._thread.is_alive()
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "rank"), [(torchrun, 0), (torchrun, 1), (torchrun, None), (lightning, 0), (lightning, 1)]
)
def test_launchers(tmp_path: Path, start: Callable[..., list[str]], rank: int | None) -> None:
    """One rank of a command gets SIGTERM, or torchrun itself, and all end, the launcher as well."""
    environ = environment(cold=True)
    command = start("trainer.max_steps=100000", "callbacks.checkpoint.every_n_train_steps=2", "data.num_workers=1")
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environ, executable=shutil.which(command[0], path=environ["PATH"]),
            stdout=output, stderr=output,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120.0
        while not list(tmp_path.glob("outputs/train/runs/*/checkpoints/step-4.ckpt")):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        found = [(rank_of(pid), pid) for pid in descendants(process.pid)]
        pids = {of: pid for of, pid in reversed(found) if of is not None}  # workers of data loaders come after ranks
        if start is lightning:
            pids[0] = process.pid
        os.kill(process.pid if rank is None else pids[rank], signal.SIGTERM)
        status = process.wait(LIMIT_SECONDS)
        said = (tmp_path / "output").read_text()
        assert status == (1 if start is torchrun else 143), said
        assert "exitcode  : 143" in said or start is lightning or rank is None
        assert "killed by signal" not in said  # the workers of data loaders
        while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def rank_of(pid: int) -> int | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ranks = [each.split(b"=")[1] for each in variables if each.startswith(b"LOCAL_RANK=")]
    return int(ranks[0]) if ranks else None
