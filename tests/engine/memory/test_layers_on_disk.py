"""Layer calls whose activations go to a file on a disk: results do not change, and sizes are as planned."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from support.alpha_plans import alpha_swap
from support.families import make_batch
from support.harness import DELAYS, EngineUnderTest, Step, assert_equal
from support.markers.slow import slow_if
from support.samples.on_disk import SWAPPED_CALLS, Counted, build

from lightning_memo.artifacts import slot_layouts as disk_layout
from lightning_memo.artifacts.slot_layouts import BLOCK_BYTES
from lightning_memo.engine.memory.disk import DiskError
from lightning_memo.engine.memory.slot_memory import Slot, SlotMemory

BATCH = make_batch(2, 48)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_layout, "_CHUNK_BYTES", 2 * BLOCK_BYTES)


def profiled(folder: Path, family: str = "llama") -> EngineUnderTest:
    under_test = EngineUnderTest(build(family), test_mode=DELAYS, disk_path=folder)
    with under_test:
        under_test.profile_step(BATCH)
    return under_test


def two_steps(under_test: EngineUnderTest) -> list[Step]:
    return [under_test.step(BATCH, seed=seed) for seed in (5, 6)]


@slow_if(lambda family: family == "llama")
@pytest.mark.parametrize(
    ("family", "alpha", "slice_tokens"),
    [("llama", 0.0, None), ("llama", 0.5, None), ("llama", 1.0, None), ("gpt2_dropout", 0.5, 13)],
)
def test_gradients_are_those_without_spilling_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, alpha: float, slice_tokens: int | None
) -> None:
    written, read = Counted(os.pwritev), Counted(os.preadv)
    monkeypatch.setattr(os, "pwritev", written)
    monkeypatch.setattr(os, "preadv", read)
    with profiled(tmp_path, family) as under_test:
        under_test.load(alpha, slice_tokens)
        expected = two_steps(under_test)
        assert not written.sizes
        for spilled in (1, 3, SWAPPED_CALLS):
            predicted = under_test.load(alpha, slice_tokens, disk_calls=spilled)
            for step, other in zip(two_steps(under_test), expected, strict=True):
                assert_equal(step, other)
            under_test.assert_as_planned()
            planned = spilled * (max(predicted) + -max(predicted) % BLOCK_BYTES)
            assert under_test.engine.swap is not None and under_test.engine.swap.disk_bytes == planned
            assert sum(written.sizes) == sum(read.sizes) == 2 * planned
            assert list(tmp_path.iterdir()) == []
            written.sizes.clear()
            read.sizes.clear()


@pytest.mark.slow
def test_host_memory_is_that_of_the_plan(tmp_path: Path) -> None:
    with profiled(tmp_path) as under_test:
        for spilled in (0, 2):
            predicted = under_test.load(0.5, disk_calls=spilled)
            under_test.step(BATCH)
            engine = under_test.engine
            assert engine.memory is not None and engine.swap is not None
            bounce = engine.memory.stores["disk"].host_bytes if spilled else 0
            assert engine.memory.stats.peak_host_bytes == engine.swap.host_bytes == engine.host_bytes
            assert engine.host_bytes == (SWAPPED_CALLS - spilled) * max(predicted) + bounce


def test_a_slot_may_go_to_the_host_in_part(tmp_path: Path) -> None:
    """A layer call has tensors that go to the host and tensors that go to the disk."""
    with profiled(tmp_path) as under_test:
        under_test.load(1.0, disk_calls=1)
        memory = under_test.engine.memory
        assert memory is not None
        slot = memory.lease(0, swap=True, sizes={"disk": 5000})
        tensors = [torch.full((n,), float(n)) for n in (100, 200, 300, 900)]
        stored = [slot.put(t, "disk" if t.numel() > 250 else "host") for t in tensors]
        assert slot.put(torch.empty(BLOCK_BYTES), "disk") is None
        assert [share.used_bytes for share in slot.shares.values()] == [448 + 832, 1216 + 3648]
        memory.offload(slot)
        memory.lease(2, swap=False)
        assert slot.buffer is None
        memory.fetch(slot, 0)
        for t, place in zip(tensors, stored, strict=True):
            assert place is not None and torch.equal(slot.load(place), t)
        memory.release(slot)


@pytest.mark.parametrize(("calls", "spilled"), [(4, 2), (5, 2), (30, 7), (30, 30), (30, 0)])
def test_spilled_calls_are_spread(calls: int, spilled: int) -> None:
    chosen = alpha_swap(0.5, calls + 2, 64, disk_calls=spilled).disk_calls
    assert len(chosen) == spilled and all(call < calls for call in chosen)
    gaps = {b - a for a, b in zip(chosen, [*chosen[1:], calls + chosen[0]], strict=True)} if chosen else {1}
    assert max(gaps) - min(gaps) <= 1


# ---- failures


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failed_disk_ends_the_step_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with profiled(tmp_path) as under_test:
        under_test.load(0.5, disk_calls=2)
        expected = under_test.step(BATCH)
        with monkeypatch.context() as broken:
            broken.setattr(os, call, fail)
            with pytest.raises(DiskError, match=r"spill file in .* failed: Input/output error; the step is lost"):
                under_test.step(BATCH)
        assert_equal(under_test.step(BATCH), expected)
        under_test.assert_as_planned()


@pytest.mark.slow
def test_a_full_disk_refuses_the_plan_and_the_engine_goes_on(tmp_path: Path) -> None:
    with profiled(tmp_path) as under_test:
        under_test.load(0.5, disk_calls=1)
        expected = under_test.step(BATCH)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES, hard))
        try:
            with pytest.raises(DiskError, match="spilling needs"):
                under_test.load(0.5, disk_calls=2)
            under_test.step(BATCH)  # is profiled
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        under_test.load(0.5, disk_calls=2)
        assert_equal(under_test.step(BATCH), expected)


def test_a_step_that_is_dropped_gives_the_file_back(tmp_path: Path) -> None:
    with profiled(tmp_path) as under_test:
        under_test.load(1.0, disk_calls=3)
        loss = under_test.model(**BATCH).loss
        memory = under_test.engine.memory
        assert memory is not None and memory.stores["disk"].rooms == 3
        del loss
        under_test.assert_empty()
        under_test.step(BATCH)


def test_a_plan_that_spills_needs_a_folder() -> None:
    under_test = EngineUnderTest(build())
    with under_test:
        under_test.profile_step(BATCH)
        with pytest.raises(ValueError, match=r"it spills .* KiB to a disk, and no disk_path is given"):
            under_test.load(0.5, disk_calls=2)


def test_slots_of_spilled_calls_have_no_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots: list[Slot] = []
    lease = SlotMemory.lease

    def noted(*arguments: Any, **settings: Any) -> Slot:
        slots.append(lease(*arguments, **settings))
        return slots[-1]

    with profiled(tmp_path) as under_test:
        under_test.load(1.0, disk_calls=2)
        monkeypatch.setattr(SlotMemory, "lease", noted)
        loss = under_test.model(**BATCH).loss
        assert [elsewhere(slot) for slot in slots] == ["disk", "host", "disk", "host", "", ""]
        loss.backward()


def elsewhere(slot: Slot) -> str:
    return "".join(place for place, share in slot.shares.items() if share.room is not None)
