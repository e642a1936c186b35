"""Memory that one process may use for activations, and the bandwidth of its disk."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.layer_costs import Budget, LayerCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeTier:
    """Disk space for activations. Spilled activations also pass over the link between device and host."""

    capacity_bytes: int
    write_bytes_per_second: float
    read_bytes_per_second: float
    bounce_share: float = 0.0
    """Host bytes of the bounce buffers per byte of the largest amount that a layer call spills."""

    def __post_init__(self) -> None:
        check_range(self, {})
        for name in ("write_bytes_per_second", "read_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be greater than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageBudget(Budget):
    """Memory that one process may use: all its device bytes, and host and NVMe bytes for activations."""

    nvme: NvmeTier | None = None

    @classmethod
    def of(cls, budget: Budget, costs: LayerCosts) -> StorageBudget:
        """Add the measured bandwidths of the disk to a budget.

        Args:
            budget: Capacities; without `spill_bytes` there is no disk.
            costs: Has the bandwidths of the disk.
        """
        nvme = None
        if budget.spill_bytes:
            nvme = NvmeTier(
                capacity_bytes=budget.spill_bytes,
                write_bytes_per_second=costs.spill_write_bytes_per_second,
                read_bytes_per_second=costs.spill_read_bytes_per_second,
            )
        return cls(
            device_bytes=budget.device_bytes, host_bytes=budget.host_bytes, spill_bytes=budget.spill_bytes, nvme=nvme
        )

    @property
    def capacities(self) -> Budget:
        """The budget without the bandwidths of the disk."""
        return Budget(device_bytes=self.device_bytes, host_bytes=self.host_bytes, spill_bytes=self.spill_bytes)
