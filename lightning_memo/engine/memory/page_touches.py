"""First touches of host memory, by which the system finds pages for it."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

_MOST_THREADS: Final = 16
_CHUNK_BYTES: Final = 64 * 2**20  # a thread's part, in which PyTorch starts no further threads


def touch_pages(memory: Tensor, cpus: Collection[int]) -> None:
    """Let threads write to each page of host memory that was not written before.

    The system clears a page when it is first written, and takes one near the CPU that writes. A page lock would do so
    in a single thread, on whichever node of the machine that thread runs.

    Args:
        memory: The memory, uint8 `[size_bytes]`.
        cpus: The CPUs on which the threads run.
    """

    def touch(start: int) -> None:
        memory[start : start + _CHUNK_BYTES : mmap.PAGESIZE].zero_()

    threads = min(len(cpus), _MOST_THREADS)
    with ThreadPoolExecutor(threads, initializer=_move_to, initargs=(cpus,)) as pool:
        for _ in pool.map(touch, range(0, memory.nbytes, _CHUNK_BYTES)):
            pass


def _move_to(cpus: Collection[int]) -> None:
    with contextlib.suppress(OSError):  # containers may forbid it
        os.sched_setaffinity(0, cpus)  # of this thread


def cpus_near(device: int, root: Path = Path("/")) -> Collection[int]:
    """Return the CPUs that this process may use and that are near a GPU; all that it may use, if none of them is near.

    Args:
        device: Number of the GPU.
        root: Folder that contains `sys`.
    """
    usable, gpu = os.sched_getaffinity(0), torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    file = root / "sys/bus/pci/devices" / address / "local_cpulist"
    near = numbers_in(file.read_text()) if file.is_file() else set()
    return usable & near or usable


def numbers_in(listed: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it, for example `0-3,8`."""
    ranges = (part.partition("-") for part in listed.strip().split(",") if part)
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}
