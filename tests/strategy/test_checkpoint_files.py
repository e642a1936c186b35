"""Checkpoint files of one process: whole or not there after kills and on full disks, and refused if damaged."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from support.disks import limited_files, mounted, remount
from support.draws import REPEATABLE, draws
from support.mutations import damage_file
from support.trainer_harness import ResumableLoader, Sequences, fit

from lightning_memo import MemoStrategy
from lightning_memo.checkpointing import CheckpointFileIO
from lightning_memo.parallel.open_checkpoint import DamagedCheckpoint
from lightning_memo.utils.files import WriteError, replacing

WRITES = CheckpointFileIO()
BIG = 2**21  # values of a checkpoint that takes some milliseconds


def checkpoint_of(epoch: int, values: int = 1000) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((values,), float(epoch)), "bias": torch.arange(9.0)}, "epoch": epoch}


def epoch_in(path: Path) -> int:
    """The epoch of a whole checkpoint."""
    read = torch.load(path, weights_only=True)
    weight = read["state_dict"]["weight"]
    assert torch.equal(weight, torch.full_like(weight, read["epoch"]))
    return read["epoch"]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refusal(path: Path, **how: Any) -> str:
    with pytest.raises(ValueError, match="checkpoint") as refused:
        WRITES.load_checkpoint(path, **how)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def another_disk() -> Iterator[Path]:
    """A folder on another file system than that of temporary files."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("there is one file system only")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


# ---- kills


def in_a_copy(function: Callable[[], None], seconds: float) -> bool:
    """Run a function in a copy of this process, kill it after some time, and return whether it still ran."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.slow
def test_kills_in_saves_to_another_disk(monkeypatch: pytest.MonkeyPatch, another_disk: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seed = 1 if REPEATABLE else random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    last, torn = another_disk / "last.ckpt", 0
    WRITES.save_checkpoint(checkpoint_of(0, BIG), last)
    for kill in range(draws(10)):
        before = epoch_in(last)

        def save(before: int = before) -> None:
            for epoch in range(before + 1, before + 1000):
                WRITES.save_checkpoint(checkpoint_of(epoch, BIG), last)
                WRITES.save_checkpoint(checkpoint_of(epoch, 10), another_disk / f"{epoch}.ckpt")

        assert in_a_copy(save, chance.uniform(0.0, 0.15))
        assert epoch_in(last) >= before, f"kill {kill} of seed {seed}"
        for path in another_disk.glob("*.ckpt"):
            assert epoch_in(path) >= 0
        torn += (another_disk / ".unfinished").exists()
        WRITES.save_checkpoint(checkpoint_of(epoch_in(last), 10), another_disk / "next.ckpt")
        assert not (another_disk / ".unfinished").exists()
    assert torn  # some kills came while a file was written
    print(f"{torn} of {draws(10)} kills left an unfinished file")  # noqa: T201
    assert not names_in(tmp_path)


def test_saves_of_another_run_in_the_folder_go_on(tmp_path: Path) -> None:
    """What is unfinished is removed only if nobody writes it."""
    with replacing(tmp_path / "slow.txt") as slow:
        slow.write_text("begun")
        WRITES.save_checkpoint(checkpoint_of(1), tmp_path / "last.ckpt")
        assert slow.read_text() == "begun"
    assert names_in(tmp_path) == {"last.ckpt", "slow.txt"}


def test_a_link_is_replaced_and_not_its_target(tmp_path: Path) -> None:
    WRITES.save_checkpoint(checkpoint_of(1), tmp_path / "step.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step.ckpt")
    WRITES.save_checkpoint(checkpoint_of(2), tmp_path / "last.ckpt")
    assert [epoch_in(tmp_path / name) for name in ("step.ckpt", "last.ckpt")] == [1, 2]


def test_a_folder_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is a folder of other things"):
        WRITES.save_checkpoint(checkpoint_of(1), tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt" / "thesis.txt").read_text() == "precious"


# ---- disks


def assert_refused(path: Path, number: int, remedy: str, values: int = BIG) -> None:
    with pytest.raises(WriteError, match=remedy) as refused:
        WRITES.save_checkpoint(checkpoint_of(2, values), path)
    message = str(refused.value)
    assert message.startswith(f"{path} cannot be written ({os.strerror(number)}): ") and "\n" not in message
    assert refused.value.errno == number


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "4m") as disk:
        WRITES.save_checkpoint(checkpoint_of(1), disk / "last.ckpt")
        assert_refused(disk / "last.ckpt", errno.ENOSPC, "free space there, or give a folder on another disk")
        assert_refused(disk / "new.ckpt", errno.ENOSPC, "free space")
        assert names_in(disk) == {"last.ckpt"} and epoch_in(disk / "last.ckpt") == 1
        WRITES.save_checkpoint(checkpoint_of(3), disk / "last.ckpt")  # a smaller one
        assert epoch_in(disk / "last.ckpt") == 3
        remount(disk, "ro")
        assert_refused(disk / "last.ckpt", errno.EROFS, "not mounted read-only")


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    WRITES.save_checkpoint(checkpoint_of(1), tmp_path / "last.ckpt")
    with limited_files(2**20):
        assert_refused(tmp_path / "last.ckpt", errno.EFBIG, "ulimit -f")
    assert names_in(tmp_path) == {"last.ckpt"} and epoch_in(tmp_path / "last.ckpt") == 1


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="give a folder that can be written to"):
        WRITES.save_checkpoint(checkpoint_of(1), tmp_path / "file" / "last.ckpt")


def train(folder: Path, steps: int, ckpt_path: Any = None, **settings: Any) -> Any:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    return fit(
        MemoStrategy(alpha=0.5), data=ResumableLoader(Sequences(14)), max_steps=steps, callbacks=[saver],
        enable_checkpointing=True, default_root_dir=folder, ckpt_path=ckpt_path, **settings,
    )  # fmt: skip


@pytest.mark.slow
def test_training_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    """The run ends with one line, and resumes from the checkpoint before it as if nothing had happened."""
    whole = train(tmp_path / "whole", 6)
    size = (tmp_path / "whole" / "step=2.ckpt").stat().st_size
    with mounted(tmp_path / "disk", str(3 * size)) as disk:
        with pytest.raises(WriteError, match=r"step=4\.ckpt cannot be written \(No space left on device\): free space"):
            train(disk, 6)
        assert {path.name for path in disk.glob("*.ckpt")} == {"step=2.ckpt", "last.ckpt"}
        (disk / "last.ckpt").unlink()
        for path in disk.glob("*.ckpt"):
            shutil.copy(path, tmp_path)
    resumed = train(tmp_path / "resumed", 6, tmp_path / "step=2.ckpt")
    assert resumed.losses == whole.losses[2:]


# ---- whose CheckpointIO it is


class Counting(TorchCheckpointIO):
    saves = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.saves += 1
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.slow
def test_the_users_checkpoint_io_comes_first(tmp_path: Path) -> None:
    own = Counting()
    train(tmp_path / "own", 2, plugins=[own])
    assert own.saves
    outer, inner = AsyncCheckpointIO(), Counting()
    train(tmp_path / "outer", 2, plugins=[outer])
    assert type(outer.checkpoint_io) is CheckpointFileIO
    train(tmp_path / "inner", 2, plugins=[AsyncCheckpointIO(inner)])
    assert inner.saves


def test_paths_that_are_not_local_are_lightnings(tmp_path: Path) -> None:
    path = f"memory://{tmp_path.name}/last.ckpt"
    WRITES.save_checkpoint(checkpoint_of(1), path)
    assert WRITES.load_checkpoint(path)["epoch"] == 1
    WRITES.save_checkpoint(checkpoint_of(2), f"file://{tmp_path}/last.ckpt")
    assert epoch_in(tmp_path / "last.ckpt") == 2
    with pytest.raises(FileNotFoundError):
        WRITES.load_checkpoint(tmp_path / "missing.ckpt")


# ---- damaged ones


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    seed = 1 if REPEATABLE else random.SystemRandom().randrange(2**32)
    chance, whole = random.Random(seed), checkpoint_of(1)
    WRITES.save_checkpoint(whole, tmp_path / "whole.ckpt")
    path, harmless = tmp_path / "last.ckpt", 0
    for number in range(draws(60)):
        shutil.copy(tmp_path / "whole.ckpt", path)
        done = damage_file(path, chance)
        try:
            read = WRITES.load_checkpoint(path, weights_only=chance.choice([True, False]))
        except ValueError as error:
            message = str(error)
            assert message.startswith(f"{path}: ") and "\n" not in message, f"{done}, seed {seed}"
            assert f"resume from {tmp_path / 'whole.ckpt'}" in message, f"{done}, seed {seed}"
        else:
            harmless += 1
            assert read["epoch"] == 1, f"{done}, seed {seed}"
            for name, weight in whole["state_dict"].items():
                assert torch.equal(read["state_dict"][name], weight), f"{number}: {done}, seed {seed}"
    assert harmless < draws(60) / 2
    print(f"{draws(60) - harmless} of {draws(60)} refused in one line, the others hold what was saved")  # noqa: T201


def test_each_value_is_checked(tmp_path: Path) -> None:
    """Every hundredth byte of a file of zeros is set: where the weights are, zipfile alone sees it."""
    path = tmp_path / "last.ckpt"
    WRITES.save_checkpoint(checkpoint_of(0, 2000), path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 100):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with contextlib.suppress(DamagedCheckpoint):
            assert torch.equal(WRITES.load_checkpoint(path)["state_dict"]["weight"], torch.zeros(2000)), at


def test_records_that_are_marked_as_directories(tmp_path: Path) -> None:
    """torch.load does not read such a record, whose bytes are as they were written."""
    path, attributes = tmp_path / "last.ckpt", 38  # place in an entry of the archive's directory
    WRITES.save_checkpoint(checkpoint_of(1), path)
    whole = path.read_bytes()
    entries = [found.start() for found in re.finditer(rb"PK\x01\x02", whole)]
    assert len(entries) > 5
    for entry in entries:
        damaged = bytearray(whole)
        damaged[entry + attributes] |= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match="is marked as a directory"):
            WRITES.load_checkpoint(path)


def test_an_incomplete_last_checkpoint_names_the_one_before(tmp_path: Path) -> None:
    train(tmp_path, 4)
    last = tmp_path / "last.ckpt"
    os.truncate(last, last.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"incomplete checkpoint: it has .* bytes, and its end is mis") as error:
        train(tmp_path, 6, "last")
    assert str(error.value).endswith(f"resume from {tmp_path / 'step=4.ckpt'}, the newest undamaged one beside it")
    os.truncate(tmp_path / "step=4.ckpt", 1000)
    with pytest.raises(ValueError, match=r"resume from .*step=2\.ckpt"):
        train(tmp_path, 6, last)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        WRITES.save_checkpoint(checkpoint_of(1), path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert WRITES.load_checkpoint(path)["epoch"] == 1
    torch.save(checkpoint_of(2), path, _use_new_zipfile_serialization=False)
    assert WRITES.load_checkpoint(path)["epoch"] == 2
    path.write_bytes(path.read_bytes()[:-200])
    assert "no checkpoint, or a damaged one" in refusal(path)
    for content in (b"", b"PK", b"text" * 100):
        path.write_bytes(content)
        assert "no checkpoint, or a damaged one" in refusal(path)


def test_refusals_of_undamaged_files_are_torchs(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    WRITES.save_checkpoint({"folder": Path("x")}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        WRITES.load_checkpoint(path, weights_only=True)
    assert WRITES.load_checkpoint(path, weights_only=False) == {"folder": Path("x")}
