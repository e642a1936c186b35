"""Pages of host memory are there, near the GPU, before they are locked."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memo.engine.memory import host_arena
from lightning_memo.engine.memory.host_arena import host_memory
from lightning_memo.engine.memory.page_touches import cpus_near, numbers_in, touch_pages

SIZE = 200 * 2**20 + 3 * mmap.PAGESIZE + 5


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_all_pages_are_touched_by_threads_on_the_given_cpus() -> None:
    usable = os.sched_getaffinity(0)
    memory, _ = host_memory(SIZE, pinned=False)
    before = resident_bytes()
    touch_pages(memory, {max(usable)})
    assert resident_bytes() - before >= 0.95 * SIZE
    assert os.sched_getaffinity(0) == usable  # of this thread
    assert not memory.any()


@pytest.mark.parametrize(
    ("listed", "numbers"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("0,2-2", {0, 2})]
)
def test_lists_of_the_kernel(listed: str, numbers: set[int]) -> None:
    assert numbers_in(listed) == numbers


@pytest.mark.parametrize("near", [True, False])
def test_cpus_near_a_gpu(near: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = os.sched_getaffinity(0)
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    folder = tmp_path / "sys/bus/pci/devices/0000:4b:01.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(f"{min(usable)},99990-99999\n" if near else "99990-99999\n")
    assert cpus_near(0, tmp_path) == ({min(usable)} if near else usable)
    assert cpus_near(0, tmp_path / "other") == usable


@pytest.mark.parametrize("free", [True, False])
def test_pages_are_touched_before_they_are_locked_if_they_are_free(free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def lock(memory: Any) -> str:
        done.append("lock")
        return "lock"

    monkeypatch.setattr(host_arena, "PageLock", lock)
    monkeypatch.setattr(host_arena, "touch_pages", lambda memory, cpus: done.append("touch"))
    monkeypatch.setattr(host_arena, "cpus_near", lambda device: {0})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(host_arena, "available_host_bytes", lambda: 4096 if free else 4095)
    memory, held = host_memory(4096, pinned=True)
    assert memory.nbytes == 4096 and held == "lock"
    assert done == (["touch", "lock"] if free else ["lock"])
