"""Host memory: pages of its own, written first near the device, locked once."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_memo.engine.memory import host
from lightning_memo.engine.memory.host import HostArena, host_memory


def test_host_memory_has_pages_of_its_own() -> None:
    blocks = [host_memory(size, pinned=False) for size in (1, 4096, 5000, 3 * 2**20)]
    for (block, lock), size in zip(blocks, (1, 4096, 5000, 3 * 2**20), strict=True):
        assert (block.nbytes, block.dtype, lock) == (size, torch.uint8, None)
        assert block.data_ptr() % 4096 == 0
        block.fill_(7)
    assert all(int(block.long().sum()) == 7 * block.nbytes for block, _ in blocks)
    assert HostArena(0, pinned=False).acquire(1) is None


class Runtime:
    """The part of the CUDA runtime that locks pages. It knows the rule that no page is locked twice."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.locked: dict[int, range] = {}
        self.result = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        pages = range(address // 4096, -(-(address + size_bytes) // 4096))
        if self.result == 0:
            assert not any(pages.start < other.stop and other.start < pages.stop for other in self.locked.values())
            self.locked[address] = pages
        return self.result

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    address = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xA3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: address}.__getitem__)
    return runtime


def test_pages_are_locked_once_and_unlocked_once(runtime: Runtime) -> None:
    arenas = [HostArena(size, pinned=True) for size in (0, 100, 5000, 100)]
    assert len(runtime.locked) == 3
    arenas[1].close()
    arenas[1].close()
    assert len(runtime.locked) == 2
    del arenas  # of a run that ended by an exception
    gc.collect()
    assert not runtime.locked
    runtime.result = 2
    with pytest.raises(MemoryError, match=r"page-locking 5000 bytes of host memory failed \(error 2\): .*memory limit"):
        HostArena(5000, pinned=True)
    gc.collect()


@pytest.mark.parametrize(
    ("near", "used"), [("{own}", {"own"}), ("4000-4002,{own}\n", {"own"}), ("4000", set()), ("", set()), (None, set())]
)
def test_locked_pages_are_written_first_by_threads_near_the_device(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, near: str | None, used: set[str]
) -> None:
    own = os.sched_getaffinity(0)
    first = min(own)
    if near is not None:
        (tmp_path / "0001:a3:00.0").mkdir()
        (tmp_path / "0001:a3:00.0" / "local_cpulist").write_text(near.format(own=first))
    monkeypatch.setattr(host, "_DEVICES", tmp_path)
    bound: list[tuple[int, set[int]]] = []
    bind = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda *call: (bound.append(call), bind(*call)))
    arena = HostArena(600 * 2**20 + 5, pinned=True)
    assert 1 <= len(bound) <= 3
    assert all(call == (0, {first} if used else own) for call in bound)
    assert os.sched_getaffinity(0) == own
    assert resident_pages(arena) == -(-(600 * 2**20 + 5) // mmap.PAGESIZE)


def resident_pages(arena: HostArena) -> int:
    buffer = arena.acquire(arena.size_bytes)
    assert buffer is not None
    pages = (ctypes.c_ubyte * -(-buffer.nbytes // mmap.PAGESIZE))()
    address = ctypes.c_void_p(buffer.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(buffer.nbytes), pages) == 0
    return sum(page & 1 for page in bytes(pages))


def test_memory_that_the_host_has_not_got_is_refused_in_one_line() -> None:
    with pytest.raises(MemoryError, match=r"bytes of host memory are refused .* lower host_memory"):
        host_memory(2**60, pinned=False)
