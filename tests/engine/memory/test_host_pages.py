"""Host memory: pages of its own, written first near the device, locked once and in the background."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memo.engine.memory import host_pages
from lightning_memo.engine.memory.host import HostArena
from lightning_memo.engine.memory.host_pages import HostPages

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def test_memory_has_pages_of_its_own() -> None:
    blocks = [HostPages(CPU) for _ in range(4)]
    for block, size in zip(blocks, (1, 4096, 5000, 3 * 2**20), strict=True):
        block.hold(size)
        assert (block.memory.nbytes, block.memory.dtype, block.held_bytes) == (size, torch.uint8, size)
        assert block.memory.data_ptr() % 4096 == 0
        block.memory.fill_(7)
    assert all(int(block.memory.long().sum()) == 7 * block.memory.nbytes for block in blocks)
    empty = HostPages(CPU)
    empty.hold(0)
    assert HostArena(empty, range(0)).acquire(1) is None


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
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    address = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xA3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: address}.__getitem__)
    return runtime


def test_pages_are_locked_once_and_unlocked_once(runtime: Runtime) -> None:
    blocks = [HostPages(CUDA) for _ in range(4)]
    for block, size in zip(blocks, (0, 100, 5000, 100), strict=True):
        block.hold(size)
        block.wait()
    assert len(runtime.locked) == 3
    blocks[1].close()
    blocks[1].close()
    assert len(runtime.locked) == 2
    del block, blocks  # of a run that ended by an exception
    gc.collect()
    assert not runtime.locked
    runtime.result = 2
    refused = HostPages(CUDA)
    refused.hold(5000)
    for _ in range(2):
        with pytest.raises(MemoryError, match=r"page-locking 5000 bytes of host memory failed \(error 2\): .*limit"):
            refused.wait()
    refused.close()


def spans(runtime: Runtime) -> list[int]:
    """Numbers of pages that are locked together."""
    return [len(pages) for _, pages in sorted(runtime.locked.items())]


def test_memory_grows_in_parts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "PART_BYTES", 4 * 4096)
    block = HostPages(CUDA)
    block.hold(4 * 4096 + 5, 11 * 4096)
    block.wait(4 * 4096)
    assert spans(runtime)[0] == 4
    address = block.memory.data_ptr()
    block.wait()
    block.pause()
    ahead = spans(runtime)
    assert ahead in ([4, 4], [4, 4, 3]) and block.held_bytes == sum(ahead) * 4096
    block.hold(10 * 4096)  # a plan that needs less than was locked ahead
    block.wait()
    assert block.memory.data_ptr() == address and spans(runtime) == [4, 4, 2]
    block.hold(11 * 4096)  # the last part is locked again
    block.wait()
    assert spans(runtime) == [4, 4, 3]
    block.reserve(40 * 4096)
    block.hold(30 * 4096)
    block.wait()
    assert spans(runtime) == [4] * 7 + [2]
    address = block.memory.data_ptr()
    block.hold(40 * 4096)
    block.wait()
    assert block.memory.data_ptr() == address and spans(runtime) == [4] * 10
    block.close()
    assert not runtime.locked and block.held_bytes == 0


def test_who_takes_a_buffer_waits_for_its_pages(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "PART_BYTES", 4096)
    may_lock = threading.Semaphore(0)
    lock = runtime.cudaHostRegister
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *call: (may_lock.acquire(), lock(*call))[1])
    block = HostPages(CUDA)
    block.hold(4 * 4096)
    arena = HostArena(block, range(4 * 4096))
    may_lock.release(2)
    assert arena.acquire(2 * 4096) is not None  # although the rest is not locked
    runtime.result = 2
    may_lock.release(2)
    with pytest.raises(MemoryError, match="page-locking 4096 bytes"):
        arena.acquire(1)
    block.close()
    assert not runtime.locked


def slowed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Events that tell that a page lock has begun, and let page locks end."""
    locking, may_lock, lock = threading.Event(), threading.Event(), runtime.cudaHostRegister
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *call: (locking.set(), may_lock.wait(), lock(*call))[2])
    return locking, may_lock


def test_locking_pauses_and_goes_on_where_it_is_needed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "PART_BYTES", 4096)
    locking, may_lock = slowed(runtime, monkeypatch)
    block = HostPages(CUDA)
    block.hold(3 * 4096, 8 * 4096)
    locking.wait()
    threading.Timer(0.05, may_lock.set).start()
    block.pause()  # waits for the part that is being locked, and leaves out the others
    assert spans(runtime) == [1]
    block.wait()
    assert spans(runtime) == [1, 1, 1]
    block.close()


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
    monkeypatch.setattr(host_pages, "_DEVICES", tmp_path)
    bound: list[tuple[int, set[int]]] = []
    bind = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda *call: (bound.append(call), bind(*call)))
    block = HostPages(CUDA)
    block.hold(600 * 2**20 + 5)
    block.wait()
    assert 1 <= len(bound) <= 3
    assert all(call == (0, {first} if used else own) for call in bound)
    assert os.sched_getaffinity(0) == own
    assert resident_pages(block.memory) == -(-(600 * 2**20 + 5) // mmap.PAGESIZE)


def resident_pages(buffer: torch.Tensor) -> int:
    pages = (ctypes.c_ubyte * -(-buffer.nbytes // mmap.PAGESIZE))()
    address = ctypes.c_void_p(buffer.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(buffer.nbytes), pages) == 0
    return sum(page & 1 for page in bytes(pages))


def test_memory_that_the_host_has_not_got_is_refused_in_one_line() -> None:
    with pytest.raises(MemoryError, match=r"bytes of host memory are refused .* lower host_memory"):
        HostPages(CPU).hold(2**60)


@pytest.mark.skipif(OVERCOMMIT.read_text().strip() == "1", reason="the system refuses nothing (vm.overcommit_memory)")
def test_memory_that_the_host_has_not_got_is_not_reserved() -> None:
    pages, size = HostPages(CPU), 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pages.reserve(size)  # more than the host has, with what it may swap
    pages.hold(4096)
    assert pages.memory.nbytes == 4096
    with pytest.raises(MemoryError, match="refused"):
        pages.hold(size)


def test_threads_that_the_system_refuses(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, {"lock"}

    def start_some(thread: threading.Thread) -> None:
        if refused & set(thread.name.split("_")):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    block = HostPages(CUDA)
    with pytest.raises(RuntimeError, match="can't start"):
        block.hold(5000)
    refused.clear()
    block.wait()
    assert len(runtime.locked) == 1
    block.close()
    refused.add("populate")
    block.hold(5000)
    with pytest.raises(RuntimeError, match="can't start"):
        block.wait()
    block.close()
    refused.clear()
    block.hold(5000)
    block.wait()
    assert len(runtime.locked) == 1
    block.close()


def test_a_pause_that_is_interrupted(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "PART_BYTES", 4096)
    locking, may_lock = slowed(runtime, monkeypatch)
    block = HostPages(CUDA)
    block.hold(3 * 4096)
    locking.wait()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(host_pages.Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            block.pause()
    may_lock.set()
    block.wait()
    assert spans(runtime) == [1, 1, 1]
    block.close()


def test_garbage_is_collected_by_a_thread_that_maps_pages(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody closed is garbage, as after a failed run, while its pages are being locked."""
    dropped, collected = threading.Event(), threading.Event()

    def populate(memory: torch.Tensor, pool: ThreadPoolExecutor) -> None:
        dropped.wait()
        pool.submit(gc.collect).result(timeout=10)
        collected.set()

    monkeypatch.setattr(host_pages, "_populate", populate)
    block: Any = HostPages(CUDA)
    block.itself = block
    gc.disable()
    try:
        block.hold(5000)
        del block
        dropped.set()
        assert collected.wait(10)
    finally:
        gc.enable()
