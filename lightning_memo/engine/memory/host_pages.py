"""Pages of host memory: mapped, written for the first time near the device, and locked."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # of Linux 5.14
_MOST_THREADS = 16  # a few saturate the memory of a socket
_PIECE_BYTES = 256 * 2**20
_DEVICES = Path("/sys/bus/pci/devices")


def host_memory(size_bytes: int, pinned: bool) -> tuple[Tensor, PageLock | None]:
    """Allocate host memory on pages of its own.

    Direct I/O and page locks work on complete pages, which two allocations must not share. Huge pages are locked
    faster. Forked processes, such as the workers of a data loader, do not inherit locked pages, because the kernel
    would copy them.

    Args:
        size_bytes: Number of bytes.
        pinned: Whether the pages are locked, so that the device can copy to and from them by itself.

    Returns:
        The memory, uint8 `[size_bytes]`, and its page lock if there is one.

    Raises:
        MemoryError: The host refuses the memory or the page lock.
    """
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8), None
    try:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{size_bytes} bytes of host memory are refused by the system ({error.strerror}): lower host_memory"
        ) from None
    with contextlib.suppress(OSError):  # a kernel can be built without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if not pinned:
        return memory, None
    pages.madvise(mmap.MADV_DONTFORK)
    _populate(memory, _near_cpus(torch.cuda.current_device()))
    return memory, PageLock(memory)


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


def _populate(memory: Tensor, cpus: set[int]) -> None:
    """Map all pages of `memory`, by threads on `cpus`.

    Linux takes a page from the NUMA node of the CPU that writes it first, and clears it. A page lock would do so in one
    thread, on whichever node it runs. What is refused here, as by an older Linux, is left to the page lock.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, size_bytes = memory.data_ptr(), memory.nbytes

    def populate(offset: int) -> None:
        advise(start + offset, min(_PIECE_BYTES, size_bytes - offset), _POPULATE_WRITE)

    threads = min(_MOST_THREADS, len(cpus))
    with ThreadPoolExecutor(threads, "populate", os.sched_setaffinity, (0, cpus)) as pool:
        pool.map(populate, range(0, size_bytes, _PIECE_BYTES))


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
