"""Memory of a process on the host and on the device, in bytes."""

from __future__ import annotations

from pathlib import Path

import torch


def of_host() -> dict[str, int | None]:
    """Returns the peak host memory of the process."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return {"peak_rss_bytes": sizes[0] if sizes else None}


def begin_peaks(device: torch.device) -> None:
    """Resets the device's peaks and counters."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def of_device(device: torch.device) -> dict[str, int | None]:
    """Returns the peaks of PyTorch's allocators since `begin_peaks`, and the retries of the device's allocator."""
    if device.type != "cuda":
        return dict.fromkeys(
            ("peak_allocated_bytes", "peak_reserved_bytes", "total_bytes", "alloc_retries", "peak_pinned_bytes")
        )
    stats, pinned = torch.cuda.memory_stats(device), torch.cuda.memory.host_memory_stats()
    return {
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "total_bytes": torch.cuda.get_device_properties(device).total_memory,
        "alloc_retries": stats["num_alloc_retries"],
        "peak_pinned_bytes": pinned.get("allocated_bytes.peak"),
    }
