"""The memory of the host and of a device that this process may still use."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final

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


def local_gpus() -> tuple[list[str], int]:
    """Return the names of the GPUs that this process sees, and the memory of the smallest one in bytes (0 without)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [gpu.name for gpu in gpus], min((gpu.total_memory for gpu in gpus), default=0)


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
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


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
