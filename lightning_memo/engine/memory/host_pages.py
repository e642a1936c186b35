"""Pages of host memory, which a thread maps and locks while training goes on.

Note: [Locking while training]
A device copies by itself only to and from locked pages. Mapping and locking them takes a second for each 4 to 10 GiB,
because the system clears each page, so the memory of a plan may take longer than the step before it. A thread therefore
locks it in parts, from the first byte on, and whoever takes a buffer waits for the parts that it lies in. During the
profiled step, the thread locks what a plan may use after it.

A copy must not cross the bounds of two parts, see `in_parts`. A single part would not do for a plan either: drivers
refuse page locks from 512 GiB on.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lightning_memo.engine.copy_streams import use_device

PART_BYTES = 4 * 2**30
_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # of Linux 5.14
_MOST_THREADS = 16  # a few saturate the memory of a socket
_POPULATED_BYTES = 256 * 2**20  # at once
_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(slots=True)
class _Part:
    """A part of the memory, and its page lock, once it has one; that took `seconds`."""

    span: range
    lock: Future[PageLock] = field(default_factory=Future)
    seconds: float = 0.0

    @property
    def is_locked(self) -> bool:
        return self.lock.done() and not self.lock.cancelled() and self.lock.exception() is None


class HostPages:
    """Host memory on pages of its own, the first bytes of which are in use.

    Direct I/O and page locks work on complete pages, which two allocations must not share. Huge pages are locked
    faster. Forked processes, such as the workers of a data loader, do not inherit locked pages, because the kernel
    would copy them.

    Args:
        device: The device that copies to and from the memory. For a CPU no pages are locked.

    Attributes:
        memory: The memory, uint8. Bytes behind those that `hold` was called for must not be used.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._mapping: mmap.mmap | None = None
        self._parts: list[_Part] = []
        self._held = self._locked = 0  # bytes in use, and those of them that are known to be locked
        self._reserved_bytes = 0
        self._stop = threading.Event()

    @property
    def held_bytes(self) -> int:
        """Host memory that is taken: what is locked so far, or what is held for a CPU."""
        locked = sum(len(part.span) for part in self._parts if part.is_locked)
        return locked if self.device.type == "cuda" else self._held

    @property
    def locking_seconds_per_byte(self) -> float:
        """How long locking took so far; 0 for a CPU."""
        locked = [part for part in self._parts if part.is_locked]
        return sum(part.seconds for part in locked) / max(sum(len(part.span) for part in locked), 1)

    def reserve(self, size_bytes: int) -> None:
        """Reserve addresses, which take no memory, so that the memory can grow up to this size and stays locked.

        Memory that is in use gets them when it has to move.
        """
        self._reserved_bytes = size_bytes

    def hold(self, size_bytes: int, ahead_bytes: int = 0) -> None:
        """Use the first `size_bytes` of the memory from now on; they are locked in the background.

        What was locked before stays locked, as far as it is used. What the memory contained is lost if it has to grow
        beyond what is reserved.

        Args:
            size_bytes: Number of bytes that are used.
            ahead_bytes: Number of bytes that are locked, if they are more. A later call may use them.

        Raises:
            MemoryError: The host refuses the memory.
        """
        self.pause()
        needed = max(size_bytes, ahead_bytes)
        if needed > self.memory.nbytes:
            self.close()
            self._mapping, self.memory = self._map_reserved(needed)
        self._held = size_bytes
        if self.device.type == "cuda" and self._mapping is not None:
            self._trim(self._mapping, needed)
            self._locked = self._parts[-1].span.stop if self._parts else 0
            starts = range(self._locked, needed, PART_BYTES)
            parts = [_Part(range(start, min(start + PART_BYTES, needed))) for start in starts]
            self._stop = threading.Event()
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            arguments = self.memory, parts, torch.device("cuda", index), self._stop
            thread = threading.Thread(target=_lock, args=arguments, name="lock", daemon=True)
            thread.start()
            self._parts += parts  # which nobody would lock if the system refused the thread
            weakref.finalize(self, _end, thread, self._stop)

    def _map_reserved(self, size_bytes: int) -> tuple[mmap.mmap, Tensor]:
        with contextlib.suppress(MemoryError):
            return _map(max(size_bytes, self._reserved_bytes))
        return _map(size_bytes)

    def _trim(self, mapping: mmap.mmap, size_bytes: int) -> None:
        """Give back the parts behind `size_bytes`, and a last one that is shorter than it is going to be."""
        while self._parts and (
            (last := self._parts[-1].span).stop > size_bytes or (len(last) < PART_BYTES and last.stop < size_bytes)
        ):
            self._parts.pop().lock.result().release()
            mapping.madvise(mmap.MADV_DONTNEED, last.start, len(last))

    def wait(self, stop: int | None = None) -> None:
        """Wait until the memory up to byte `stop` is locked, or all that is in use.

        Raises:
            MemoryError: The host refuses the page lock.
        """
        stop = self._held if stop is None else stop
        if stop <= self._locked or self.device.type != "cuda":
            return
        if self._stop.is_set() or not self._parts or self._parts[-1].span.stop < stop:  # paused
            self.hold(self._held)
        for part in self._parts:
            if part.span.start < stop:
                part.lock.result()
                self._locked = part.span.stop

    def pause(self) -> None:
        """Lock no more pages until others are needed."""
        self._stop.set()
        for part in self._parts:
            with contextlib.suppress(Exception):  # is raised where the memory is needed
                part.lock.result()
        self._parts = [part for part in self._parts if part.is_locked]
        self._locked = self._parts[-1].span.stop if self._parts else 0

    def close(self) -> None:
        """Unlock the pages and free the memory. The caller makes sure that no copy is under way."""
        self.pause()
        for part in self._parts:
            part.lock.result().release()
        self._mapping, self.memory, self._parts = None, torch.empty(0, dtype=torch.uint8), []
        self._held = self._locked = 0


def in_parts(memory: Tensor) -> Sequence[Tensor]:
    """Cut host memory, uint8, where one page lock ends and the next one begins."""
    first = PART_BYTES - memory.storage_offset() % PART_BYTES
    if memory.nbytes <= first:
        return (memory,)
    return (memory[:first], *memory[first:].split(PART_BYTES))


def _map(size_bytes: int) -> tuple[mmap.mmap, Tensor]:
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{size_bytes} bytes of host memory are refused by the system ({error.strerror}): lower host_memory"
        ) from None
    with contextlib.suppress(OSError):  # a kernel can be built without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def _lock(memory: Tensor, parts: Sequence[_Part], device: torch.device, stop: threading.Event) -> None:
    """Map and lock parts of the memory one after the other."""
    failure: BaseException | None = None
    try:
        use_device(device)
        cpus = _near_cpus(torch.cuda.current_device())
        threads = min(_MOST_THREADS, len(cpus))
        with ThreadPoolExecutor(threads, "populate", os.sched_setaffinity, (0, cpus)) as pool:
            for part in itertools.takewhile(lambda _: not stop.is_set(), parts):
                pages, started = memory[part.span.start : part.span.stop], time.perf_counter()
                _populate(pages, pool)
                lock = PageLock(pages)
                part.seconds = time.perf_counter() - started
                part.lock.set_result(lock)
    except BaseException as error:  # whoever waits raises it
        failure = error
    for part in parts:
        if not part.lock.done():
            part.lock.cancel() if failure is None else part.lock.set_exception(failure)


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    # A process must not end within a page lock. Garbage is collected in any thread, also one that `thread` waits for.
    if threading.current_thread() is threading.main_thread():
        thread.join()


def _near_cpus(device: int) -> set[int]:
    """Return the CPUs of this process that are on the device's NUMA node, or all of them if there is none."""
    own = os.sched_getaffinity(0)
    about = torch.cuda.get_device_properties(device)
    name = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    try:
        near = _parsed_cpus((_DEVICES / name / "local_cpulist").read_text())
    except OSError:  # a container can hide it
        return own
    return own & near or own


def _parsed_cpus(text: str) -> set[int]:
    """Return the CPUs that a list of Linux contains, such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _populate(memory: Tensor, pool: ThreadPoolExecutor) -> None:
    """Map all pages of `memory`.

    Linux takes a page from the NUMA node of the CPU that writes it first, and clears it. A page lock would do so in one
    thread, on whichever node it runs. What is refused here, as by an older Linux, is left to the page lock.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, size_bytes = memory.data_ptr(), memory.nbytes

    def populate(offset: int) -> None:
        advise(start + offset, min(_POPULATED_BYTES, size_bytes - offset), _POPULATE_WRITE)

    list(pool.map(populate, range(0, size_bytes, _POPULATED_BYTES)))


class PageLock:
    """Locks the pages of host memory, so that the device can copy to and from them by itself.

    PyTorch's pinned memory pool rounds every request up to a power of two; registering ordinary memory does not. The
    pages are unlocked by `release`, when this object is deleted, or when the process ends.

    Raises:
        MemoryError: The host refuses the page lock.
    """

    def __init__(self, memory: Tensor) -> None:
        self._unlock = weakref.finalize(self, _unlock, memory)
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if error != torch.cuda.cudart().cudaError.success:
            self._unlock.detach()
            why = torch.cuda.cudart().cudaGetErrorString(error)
            raise MemoryError(
                f"page-locking {memory.nbytes} bytes of host memory failed ({why}): lower host_memory, "
                "or raise the memory limit of the container or job"
            )

    def release(self) -> None:
        """Unlock the pages. The caller makes sure that no copy is under way."""
        self._unlock()


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
