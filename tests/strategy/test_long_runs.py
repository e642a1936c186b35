"""A long run with everything on holds no more at its end than after its first steps, and leaves nothing behind.

`FLAT_STEPS=2000 pytest -s tests/strategy/test_long_runs.py` runs so many steps, and prints what it measured.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support.families import PlainBlock, PlainModel, make_batch
from support.markers.slow import slow_if
from support.processes import forking
from support.trainer_harness import LanguageModel, fit
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.callbacks import Monitor, WriteReport
from lightning_memo.profiler import measured_costs as costs

STEPS = int(os.environ.get("FLAT_STEPS", "80"))
LENGTHS = (*(96,) * 17, 40, 64, 72)
PERIOD = len(LENGTHS)  # steps after which lengths, validation and checkpoints come again as they were
FIRST = 40  # by then memory is planned
FIRST_OF_GIVEN = 10  # and by then a plan that was given is in force
ALLOWED_RSS = 6 * 2**20
LAYER_INPUT_BYTES = 2 * max(LENGTHS) * 32 * 4


class Held(NamedTuple):
    """What a process has at one moment."""

    rss_bytes: int
    tensor_bytes: int
    arena_bytes: int
    host_bytes: int
    threads: int
    files: int
    shared_segments: int


def held(trainer: Trainer) -> Held:
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        # Fake tensors, which tests before may have left in PyTorch's caches, have no memory.
        if issubclass(type(t), Tensor) and not issubclass(type(t), FakeTensor) and t.layout == torch.strided
    }
    return Held(
        rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        tensor_bytes=sum(storages.values()),
        arena_bytes=trainer.strategy.memory.stats.arena_bytes,
        host_bytes=trainer.strategy.engine.host_bytes,
        threads=len(list(Path("/proc/self/task").iterdir())),
        files=len(list(Path("/proc/self/fd").iterdir())),
        shared_segments=sum(name.startswith(f"torch_{os.getpid()}_") for name in segments()),
    )


def segments() -> list[str]:
    """Shared memory of the machine."""
    return sorted(path.name for path in Path("/dev/shm").iterdir())


class Watch(Callback):
    """Notes what is held every so many steps from one on, and leaks a tensor in each, if asked."""

    def __init__(self, leak: bool = False, first: int = FIRST) -> None:
        self.seen: list[Held] = []
        self._first = first
        self._leaked: list[Tensor] | None = [] if leak else None

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._leaked is not None:
            self._leaked.append(torch.empty(LAYER_INPUT_BYTES // 4))
        if trainer.global_step < self._first:
            while trainer.strategy.memory.busy:  # planned at the same step on every machine
                time.sleep(0.01)
        elif (trainer.global_step - self._first) % PERIOD == 0:
            self.seen.append(held(trainer))


class Batches(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return make_batch(2, LENGTHS[index % len(LENGTHS)], seed=index)


def loader(steps: int) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Batches(steps), batch_size=None)


def model() -> PlainModel:
    return PlainModel([PlainBlock(dropout=0.1) for _ in range(6)])


def train(folder: Path, steps: int, *callbacks: Callback, plan: Path | None = None) -> MemoStrategy:
    """With a plan that spills, planned memory, a monitor, a report, checkpoints, validation and lengths that vary."""
    (folder / "disk").mkdir(exist_ok=True)
    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=PERIOD)
    strategy = MemoStrategy(alpha=0.5, plan_memory=True, host_memory="700KiB", disk_path=folder / "disk", plan=plan)
    fit(
        strategy,
        LanguageModel(model),
        loader(max(steps, PERIOD)),
        val_data=loader(2),
        max_steps=steps,
        val_check_interval=PERIOD,
        callbacks=[Monitor(), WriteReport(), saver, *callbacks],
        logger=CSVLogger(folder / "logs", flush_logs_every_n_steps=PERIOD),
        log_every_n_steps=5,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    return strategy


def growth(seen: list[Held]) -> dict[str, int]:
    """How much more of each there is than at first, at most."""
    return {name: max(getattr(each, name) for each in seen) - getattr(seen[0], name) for name in Held._fields}


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_a_long_run_is_flat(tmp_path: Path) -> None:
    watch = Watch()
    train(tmp_path, STEPS, watch)
    seen = watch.seen
    sys.stdout.write(f"\n{STEPS} steps: {seen[0]}, {seen[-1]}, growth {growth(seen)}\n")
    assert len(seen) == (STEPS - FIRST) // PERIOD + 1
    assert seen[0].arena_bytes > 0 and seen[0].host_bytes > 0
    grown = growth(seen)
    assert grown.pop("rss_bytes") <= ALLOWED_RSS
    assert set(grown.values()) == {0}, grown
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.slow  # a long training
@pytest.mark.usefixtures("own_folder")
def test_a_run_with_a_given_plan_is_flat_from_step_10(tmp_path: Path) -> None:
    """Its buffers have their places from the second step on: nothing is recorded or solved."""
    made = train(tmp_path, FIRST, Watch()).plan
    assert made is not None and made.placement is not None
    made.save(tmp_path / "given.json")
    watch = Watch(first=FIRST_OF_GIVEN)
    steps = max(STEPS // 2, FIRST_OF_GIVEN + 2 * PERIOD)
    strategy = train(tmp_path, steps, watch, plan=tmp_path / "given.json")
    sys.stdout.write(f"\n{steps} steps: {watch.seen[0]}, {watch.seen[-1]}, growth {growth(watch.seen)}\n")
    assert strategy.plan is not None and strategy.plan.placement == made.placement
    assert watch.seen[0].arena_bytes == made.placement.peak_bytes
    grown = growth(watch.seen)
    assert grown.pop("rss_bytes") <= ALLOWED_RSS
    assert grown.pop("tensor_bytes") <= 4  # the loss of the first validation, which comes after step 10
    assert set(grown.values()) == {0}, grown


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_a_leak_of_one_layer_input_in_a_step_would_show(tmp_path: Path) -> None:
    watch = Watch(leak=True)
    train(tmp_path, FIRST + PERIOD, watch)
    assert growth(watch.seen)["tensor_bytes"] == PERIOD * LAYER_INPUT_BYTES


# ---- what is left when a run ends


class Ends(Callback):
    """Ends the run in some way, in its fifth step."""

    def __init__(self, way: str) -> None:
        self._way = way

    @override
    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            if self._way == "exception":
                raise KeyError("an exception")
            if self._way != "end":
                os.kill(os.getpid(), signal.Signals[self._way])


def run_to_an_end(folder: Path, way: str) -> None:
    """A process of its own session; writes what it still has if it gets to."""
    os.setsid()
    os.chdir(folder)
    torch.set_num_threads(1)
    costs._BANDWIDTH_SECONDS = 0.005  # of no interest here
    train(folder, 2, Watch())  # what libraries keep for good is there afterwards, and the allocator is compiled
    before = own()
    with contextlib.suppress(KeyError, SystemExit):
        train(folder, 6, Watch(), Ends(way))
    (folder / "left").write_text(json.dumps([before, own()]))


def own() -> tuple[list[str], list[str]]:
    """Names of threads, and of open files; matplotlib keeps those of its fonts."""
    gc.collect()
    files = []
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the listing's own
            files.append(str(path.readlink()))
    threads = sorted(thread.name for thread in threading.enumerate())
    return threads, sorted(file for file in files if not file.endswith(".ttf"))


def session(leader: int) -> list[int]:
    """Processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(path.name))
    return found


def abandoned(names: Iterable[str]) -> list[str]:
    """Those segments of shared memory whose process has ended; other tests make some of their own meanwhile."""
    owners = ((name, name.split("_")[1]) for name in names if name.startswith("torch_"))
    return [name for name, owner in owners if not Path("/proc", owner).exists()]


@slow_if(lambda way: way in ("end", "exception", "SIGINT"))
@pytest.mark.parametrize("way", ["end", "exception", "SIGTERM", "SIGINT", "SIGKILL"])
def test_nothing_is_left(way: str, tmp_path: Path) -> None:
    segments_before = abandoned(segments())
    process = forking().Process(target=run_to_an_end, args=(tmp_path, way), daemon=False)
    process.start()
    leader = process.pid
    assert leader is not None
    process.join()
    assert process.exitcode == (-signal.SIGKILL if way == "SIGKILL" else 0)
    assert session(leader) == []
    assert abandoned(segments()) == segments_before
    assert list((tmp_path / "disk").iterdir()) == []
    if way != "SIGKILL":
        before, after = json.loads((tmp_path / "left").read_text())
        assert after == before
