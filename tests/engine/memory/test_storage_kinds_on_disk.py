"""Plans by kinds of tensors with a disk: results do not change, and bytes and budgets are as planned."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.families import make_batch
from support.harness import DELAYS, assert_close, assert_equal
from support.modes import BY_KIND
from support.samples.on_disk import Counted, build, spill_threads
from support.samples.storage_kinds import BASE, TOKENS, ByKind, Rows
from support.samples.storage_problems import ALWAYS, MIB, planned
from support.trainer_harness import LanguageModel, Result, ResumableLoader, Sequences, fit, shorten_measurements

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.costs import Budget
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.slot_layouts import DiskLayout, whole_blocks
from lightning_memo.engine.memory.disk import DiskError
from lightning_memo.profiler import measured_costs as costs

KIB = 1024
BATCH = make_batch(2, TOKENS)


def four_ways(names: list[str]) -> tuple[Rows, ...]:
    """Classes of layer calls: to all places, to the host, to the disk, and kept."""
    mixed: Rows = {
        "input": [("device", 0, 8), ("host", 8, 24), ("disk", 24, TOKENS)],
        "attention": [("disk", 16, 32), ("device", 32, 40), ("host", 40, TOKENS)],
        "other": [("disk", 48, TOKENS)],
        names[0]: [("host", 0, 16), ("disk", 16, 40)],
    }
    disk: Rows = {"input": [("disk", 0, TOKENS)], "attention": [("disk", 0, TOKENS)], names[1]: [("disk", 3, 30)]}
    kept: Rows = {"input": [("device", 0, TOKENS)], "attention": [("device", 0, TOKENS)]}
    return mixed, BASE, disk, kept


def on_host(rows: Rows) -> Rows:
    return {kind: [("host" if place == "disk" else place, a, b) for place, a, b in of] for kind, of in rows.items()}


@pytest.mark.slow
def test_gradients_and_bytes_of_plans_that_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, read = Counted(os.pwritev), Counted(os.preadv)
    monkeypatch.setattr(os, "pwritev", written)
    monkeypatch.setattr(os, "preadv", read)
    with ByKind(build(), DELAYS, tmp_path) as under_test:
        under_test.profile_step(BATCH)
        ways = four_ways(under_test.products)
        under_test.load_storage(*map(on_host, ways))
        expected = under_test.step(BATCH)
        assert not written.sizes
        under_test.load_storage(*ways)
        assert_equal(under_test.step(BATCH), expected)
        under_test.assert_as_planned()
        engine = under_test.engine
        assert engine.swap is not None and engine.memory is not None
        spilled = engine.swap.memory.disk[:-2]
        assert [size > 0 for size in spilled] == [True, False, True, False]
        assert sum(written.sizes) == sum(read.sizes) == engine.swap.disk_bytes == sum(map(whole_blocks, spilled))
        bounce = DiskLayout(max(spilled)).bounce_bytes
        assert engine.memory.stats.peak_host_bytes == engine.host_bytes == engine.swap.memory.host + bounce


@pytest.mark.slow
def test_a_full_disk_refuses_the_plan_and_the_engine_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ByKind(build(), DELAYS, tmp_path) as under_test:
        expected = under_test.profile_step(BATCH)
        ways = four_ways(under_test.products)
        with monkeypatch.context() as full:
            full.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(DiskError, match=r"^spilling needs .*No space left on device\): free space") as caught:
                under_test.load_storage(*ways)
        assert "\n" not in str(caught.value) and spill_threads() == []
        under_test.load_storage(*ways)
        assert_close(under_test.step(BATCH), expected)


# ---- planning


def budget_of(host_mib: int, disk_gib: int = 1) -> Budget:
    return Budget(device_bytes=ALWAYS + 150 * MIB, host_bytes=host_mib * MIB, disk_bytes=disk_gib * 2**30)


@pytest.mark.parametrize("unit", [1, 2**16])
def test_host_and_disk_are_kept_to_the_byte(unit: int) -> None:
    budget = budget_of(60)
    plan, without = planned(budget, unit), planned(budget_of(60, 0), unit)
    assert plan.step_seconds < without.step_seconds
    assert plan.swap.disk_bytes > 0 and plan.budget == budget
    assert 0.9 * budget.host_bytes < plan.swap.host_bytes <= budget.host_bytes
    assert plan.swap.host_bytes == plan.swap.memory.host + plan.swap.disk_layout.bounce_bytes
    assert plan.device_bytes <= budget.device_bytes
    assert Plan.from_json(plan.to_json()) == plan
    tight = replace(budget, disk_bytes=plan.swap.disk_bytes * 3 // 4)
    assert tight.disk_bytes * 0.9 < planned(tight, unit).swap.disk_bytes <= tight.disk_bytes


def test_a_disk_that_does_not_help_is_not_used() -> None:
    assert planned(budget_of(60), disk_speed=1e3).swap.disk_bytes == 0
    assert planned(budget_of(1)).swap.disk_bytes == 0  # a step would take as long
    assert planned(budget_of(4)).step_seconds < planned(budget_of(4, 0)).step_seconds
    no_room_for_buffers = replace(budget_of(60), host_bytes=4 * KIB)
    assert planned(no_room_for_buffers).swap.disk_bytes == 0


def test_bounce_buffers_fit_a_small_host() -> None:
    plan = planned(budget_of(24))
    assert 20 * MIB < plan.swap.disk_layout.bounce_bytes <= plan.swap.host_bytes <= 24 * MIB
    assert plan.step_seconds < planned(budget_of(24, 0)).step_seconds


@pytest.mark.parametrize("host_mib", [6, 12, 24])
def test_what_bounce_buffers_lack_is_host_memory(host_mib: int) -> None:
    plan = planned(budget_of(host_mib, 64))
    assert not plan.swap.storage.has_one_alpha and plan.swap.disk_bytes > 0
    rows = {row.resource: row for row in plan.sensitivities}
    assert (rows["host memory"].limit, rows["host memory"].binds) == (host_mib, True)
    assert rows["host memory"].used == plan.swap.host_bytes / MIB
    assert (rows["disk space"].limit, rows["disk space"].binds) == (64, False)
    assert rows["disk space"].used == plan.swap.disk_bytes / 2**30


def test_tables_show_the_disk() -> None:
    plan = planned(budget_of(60))
    rows = [" ".join(line.split()) for line in plan.explain().splitlines()]
    assert any(row.startswith("│ disk │") and f"of 1.0 GiB, for {len(plan.swap.disk_calls)}" in row for row in rows)
    assert any("size kept swapped on the disk recomputed" in row for row in rows)
    assert any(row.startswith("disk space 1 GiB") for row in rows)
    assert any(row.startswith("disk write bandwidth 200 MB/s") for row in rows)


# ---- training

SETTINGS: dict[str, Any] = {"test_mode": BY_KIND, "device_memory": "1.6MiB", "host_memory": "160KiB"}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    shorten_measurements(monkeypatch)
    for name in ("disk_bandwidth", "copy_bandwidth"):  # otherwise the plan would depend on the load of this machine
        monkeypatch.setattr(costs, name, lambda *_: (1e12, 1e12))
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def train(steps: int, disk: Path | None, **settings: Any) -> Result:
    data = ResumableLoader(Sequences(10))
    strategy = MemoStrategy(**SETTINGS, disk_path=disk)
    return fit(strategy, LanguageModel(build), data, max_steps=steps, max_epochs=9, **settings)


@pytest.mark.slow
def test_training_is_resumed_with_the_plan_that_spills(disk: Path) -> None:
    saver = ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=-1)
    whole = train(4, disk, callbacks=[saver], enable_checkpointing=True)
    swap = whole.plan.swap
    assert not swap.storage.has_one_alpha and swap.disk_bytes > 0
    assert swap.host_bytes <= 160 * KIB and whole.plan.device_bytes <= whole.plan.budget.device_bytes
    assert whole.held == [0] * 4
    assert list(disk.iterdir()) == [] and spill_threads() == []
    resumed = train(4, disk, ckpt_path=Path("saved") / "epoch=0-step=2.ckpt")
    assert resumed.plan.swap == swap
    assert resumed.losses == whole.losses[2:]
