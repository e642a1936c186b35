"""The machine's free memory, and its copy bandwidth between device and host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

# Files of a memory cgroup: limit, usage, and the key of memory.stat that counts page cache that was not used recently.
_V1_FILES: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES: Final = ("memory.max", "memory.current", "inactive_file")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the host bytes that this process can allocate before the kernel kills a process.

    This is the minimum of the machine's available memory and the memory left in each memory cgroup (v1 or v2) above
    this process. Page cache that was not used recently counts as available, because the kernel reclaims it first.

    Args:
        root: Folder that contains `proc` and `sys`.

    Raises:
        ValueError: This system does not report its available memory.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        machine_kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise ValueError('available host memory can\'t be read here: set host_memory, for example "32GiB"') from None
    return max(min([int(machine_kib) * 1024, *_cgroup_bytes(root)]), 0)


def _cgroup_bytes(root: Path) -> list[int]:
    """Return the bytes left in each memory cgroup that limits this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    left = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            left += _bytes_above(mount / "memory", group, _V1_FILES)
        elif not controllers:
            # If v1 controllers are mounted too, v2 has a folder of its own.
            left += _bytes_above(mount, group, _V2_FILES) + _bytes_above(mount / "unified", group, _V2_FILES)
    return left


def _bytes_above(mount: Path, group: str, files: tuple[str, str, str]) -> list[int]:
    """Return the bytes left in a cgroup and in all its ancestors, each of which limits its descendants."""
    path = PurePosixPath(group.lstrip("/"))
    # A container may see its group by the host's path, of which only the mount itself exists in the container.
    groups = [PurePosixPath()] if ".." in path.parts else [path, *path.parents]
    left = (_bytes_left(mount / group, *files) for group in dict.fromkeys(groups))
    return [size_bytes for size_bytes in left if size_bytes is not None]


def _bytes_left(folder: Path, limit_name: str, usage_name: str, cache_key: str) -> int | None:
    """Return limit minus usage plus reclaimable page cache of a cgroup in bytes; `None` if it has no limit."""
    try:
        limit = (folder / limit_name).read_text().strip()
        usage_bytes = int((folder / usage_name).read_text())
    except OSError:
        return None
    if limit == "max":
        return None
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        stat = {}
    return int(limit) - max(usage_bytes - int(stat.get(cache_key, 0)), 0)


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
