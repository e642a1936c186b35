"""The free memory of a device, and its copy bandwidth from and to the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from lightning_memo.utils.free_host_memory import available_host_bytes

if TYPE_CHECKING:
    import torch


def free_device_bytes(device: torch.device) -> int:
    """Return the device bytes that this process can allocate for tensors.

    On a GPU this is the memory that the driver reports as free plus the memory that PyTorch has reserved and not
    allocated. On a CPU it is the available host memory.

    Args:
        device: A CPU or a CUDA device.

    Raises:
        ValueError: The device is neither, or the host memory can't be read (see `available_host_bytes`).
    """
    if device.type == "cpu":
        return available_host_bytes()
    if device.type != "cuda":
        raise ValueError(
            f'free memory of device {str(device)!r} can\'t be read: set device_memory, for example "80GiB"'
        )
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def measure_copy_bandwidth(
    copy_out: Callable[[], object],
    copy_in: Callable[[], object],
    size_bytes: int,
    seconds: float,
    start_thread: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """Time copies in both directions at once, as they run when offloads and prefetches of a step overlap.

    After one warm-up call, each function is called repeatedly in a thread of its own, until the time is over and both
    have copied at least once.

    Args:
        copy_out: Copies from device to host and returns when the copy has ended. It must release the GIL, as PyTorch's
            copies do.
        copy_in: Copies from host to device in the same way.
        size_bytes: Number of bytes that each call copies.
        seconds: Duration of the measurement.
        start_thread: Called first in each thread.

    Returns:
        Bytes per second of `copy_out` and of `copy_in`.

    Raises:
        Exception: An error that one of the functions raised.
    """
    copies = (copy_out, copy_in)
    for copy in copies:
        copy()
    copied = (threading.Event(), threading.Event())
    failed = threading.Event()

    def repeat(index: int) -> float:
        count, begin = 0, time.perf_counter()
        try:
            while not failed.is_set():
                copies[index]()
                count += 1
                copied[index].set()
                elapsed = time.perf_counter() - begin
                if elapsed >= seconds and copied[1 - index].is_set():
                    return count * size_bytes / elapsed
        except BaseException:
            failed.set()
            raise
        return 0.0

    with ThreadPoolExecutor(2, initializer=start_thread) as pool:
        offload, prefetch = pool.map(repeat, range(2))
    return offload, prefetch
