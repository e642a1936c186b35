"""`MemoStrategy(disk_path=...)`: trains as without a disk, in less host memory, and refuses what cannot be."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.families import PlainBlock, PlainModel
from support.parallel_training import Run, train_together
from support.samples.on_disk import spill_threads
from support.trainer_harness import LanguageModel, Result, fit, listening, shorten_measurements
from torch import nn

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.slot_layouts import DiskLayout
from lightning_memo.engine.memory.disk import DiskError
from lightning_memo.utils.units import format_bytes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shorten_measurements(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def eight_blocks() -> nn.Module:
    return PlainModel([PlainBlock(dropout=0.2) for _ in range(8)])


def train(max_steps: int = 3, callbacks: tuple[Callback, ...] = (), **settings: Any) -> Result:
    strategy = MemoStrategy(**{"alpha": 0.5} | settings)
    return fit(strategy, LanguageModel(eight_blocks), max_steps=max_steps, callbacks=list(callbacks))


@pytest.mark.slow
def test_training_is_the_same_in_less_host_memory(disk: Path) -> None:
    expected = train()
    slot_bytes = expected.plan.swap.memory.slot
    host_memory = 2 * slot_bytes + DiskLayout(slot_bytes).bounce_bytes
    spilled = train(host_memory=host_memory, disk_path=disk)
    assert spilled.losses == expected.losses
    assert len(spilled.plan.swap.disk_calls) == 4
    assert expected.plan.swap.host_bytes > host_memory >= spilled.plan.swap.host_bytes
    assert spilled.held == [0, 0, 0]
    assert list(disk.iterdir()) == [] and spill_threads() == []


@pytest.mark.slow
def test_a_saved_plan_is_used_where_the_disk_has_room(disk: Path) -> None:
    slot_bytes = train(max_steps=1).plan.swap.memory.slot
    settings = {"host_memory": 3 * slot_bytes, "disk_path": disk, "max_steps": 1}
    made = train(**settings)
    made.plan.save("plan.json")
    with listening() as heard:
        assert train(plan="plan.json", **settings).plan.swap == made.plan.swap
    assert "lightning_memo: uses the plan plan.json." in heard
    needs = format_bytes(made.plan.swap.disk_bytes)
    with (
        pytest.warns(UserWarning, match=f"profiled: it spills {needs} to the disk, and 1.0 KiB is available"),
        pytest.raises(ValueError, match=r"1.0 KiB of disk, whose buffers take .*: set a smaller alpha"),
    ):
        train(plan="plan.json", disk_memory="1KiB", **settings)


class Failing(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise KeyError("an exception")


def test_an_exception_leaves_nothing_on_the_disk(disk: Path) -> None:
    slot_bytes = train(max_steps=1).plan.swap.memory.slot
    with pytest.raises(KeyError):
        train(host_memory=slot_bytes * 3, disk_path=disk, callbacks=(Failing(),))
    assert list(disk.iterdir()) == [] and spill_threads() == []


@pytest.mark.slow
def test_a_full_disk_ends_the_fit_and_the_process_goes_on(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot_bytes = train(max_steps=1).plan.swap.memory.slot

    def refuse(_: int, __: int, size_bytes: int) -> None:
        if size_bytes > 2 * DiskLayout(slot_bytes).region_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(DiskError, match=r"spilling needs .* free \(No space left on device\): free space"):
            train(host_memory=slot_bytes * 3, disk_path=disk)
    assert spill_threads() == []
    assert train(host_memory=slot_bytes * 3, disk_path=disk).plan.swap.disk_calls


def test_a_disk_that_is_not_needed_is_told(disk: Path) -> None:
    with listening() as heard:
        assert train(max_steps=1, disk_path=disk).plan.swap.disk_calls == ()
    assert any("disk_path is not needed, because the host has room for all" in line for line in heard)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"disk_path": "missing"},
            r'disk_path="missing": no file can be created there \(No such file or directory\)',
        ),
        ({"disk_path": ""}, "disk_path='' is not usable: give a folder on a local disk"),
        ({"disk_memory": "1GiB"}, "disk_memory='1GiB' is for a disk: give disk_path"),
        ({"disk_path": ".", "disk_memory": "much"}, "disk_memory='much' is not a size"),
        ({"disk_path": ".", "slice_tokens": 8, "stream_from_host": "hidden"}, 'set stream_from_host="none"'),
        ({"disk_path": ".", "slice_tokens": 8}, 'disk_path="." needs activations that leave the device by whole'),
        (
            {"disk_path": ".", "slice_tokens": 8, "stream_from_host": "model"},
            'stream_from_host="none", or leave disk_path out',
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        MemoStrategy(**settings)
    assert "\n" not in str(caught.value)


# ---- several processes


def swap_plan(trainer: Any) -> dict[str, Any]:
    return {"swap": trainer.strategy.plan.swap}


@pytest.mark.slow
def test_processes_spill_into_one_folder(disk: Path) -> None:
    run, settings = Run(family="llama", tokens=64, batch=4, steps=2), {"alpha": 0.5, "zero_stage": 3}
    expected = train_together(2, run, settings, after=swap_plan)
    slot_bytes = expected.notes["swap"][0].memory.slot
    # Each of the two has too little for the two layers that are swapped.
    tight = {"host_memory": 2 * (2 * slot_bytes - 1), "disk_path": str(disk)}
    spilled = train_together(2, run, settings | tight, after=swap_plan)
    assert [len(swap.disk_calls) for swap in spilled.notes["swap"]] == [2, 2]
    assert spilled.losses == expected.losses
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in spilled.weights.items())
    assert list(disk.iterdir()) == []
