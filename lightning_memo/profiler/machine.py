"""What the machine has free, and how fast it copies between device and host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

# Files of a memory cgroup: limit, usage, and the key of memory.stat that counts cache not used lately.
_V1_FILES: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES: Final = ("memory.max", "memory.current", "inactive_file")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Host bytes that this process can still take before the kernel kills something.

    The least of what the whole machine has available and what each memory cgroup above this process (v1 or v2) has
    left. Page cache that was not used lately counts as available, since the kernel reclaims it first.

    Args:
        root: folder that holds `proc` and `sys`.

    Raises:
        ValueError: this system doesn't say how much memory is available.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        machine_kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise ValueError('available host memory can\'t be read here: set host_memory, like "32GiB"') from None
    return max(min([int(machine_kib) * 1024, *_cgroup_rooms(root)]), 0)


def _cgroup_rooms(root: Path) -> list[int]:
    """Bytes left in each memory cgroup that limits this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    rooms = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            rooms += _rooms_above(mount / "memory", group, _V1_FILES)
        elif not controllers:
            # Where v1 controllers are mounted too, v2 is in a folder of its own.
            rooms += _rooms_above(mount, group, _V2_FILES) + _rooms_above(mount / "unified", group, _V2_FILES)
    return rooms


def _rooms_above(mount: Path, group: str, files: tuple[str, str, str]) -> list[int]:
    """Bytes left in a cgroup and all those above it: each limits everything below."""
    path = PurePosixPath(group.lstrip("/"))
    # A container may see its group by the host's path, of which only the mount itself exists here.
    groups = [PurePosixPath()] if ".." in path.parts else [path, *path.parents]
    rooms = (_room(mount / group, *files) for group in dict.fromkeys(groups))
    return [room for room in rooms if room is not None]


def _room(folder: Path, limit_name: str, usage_name: str, cache_key: str) -> int | None:
    """Limit minus usage plus reclaimable cache of one cgroup in bytes; None: no limit."""
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
    """Device bytes that tensors of this process can still take.

    Args:
        device: on a GPU, what the driver has free plus what PyTorch has reserved and not given out; on a CPU the
            host's memory is the device's.

    Raises:
        ValueError: the device is of another kind, or see `available_host_bytes`.
    """
    if device.type == "cpu":
        return available_host_bytes()
    if device.type != "cuda":
        raise ValueError(f'free memory of device {str(device)!r} can\'t be read: set device_memory, like "80GiB"')
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def measure_copy_bandwidth(
    copy_out: Callable[[], object], copy_in: Callable[[], object], size_bytes: int, seconds: float
) -> tuple[float, float]:
    """Time copies in both directions at once, as they run when a step's offloads and prefetches meet.

    Each callable runs again and again in a thread of its own, after one copy that isn't timed, until the time is
    over and both have copied at least once.

    Args:
        copy_out: makes one copy from device to host, and returns when it is done. It must release the GIL, as
            PyTorch's copies do.
        copy_in: the same from host to device.
        size_bytes: bytes that each call copies.
        seconds: how long to measure.

    Returns:
        Bytes per second of `copy_out` and of `copy_in`.

    Raises:
        Exception: what either callable raised.
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

    with ThreadPoolExecutor(2) as pool:
        offload, prefetch = pool.map(repeat, range(2))
    return offload, prefetch
