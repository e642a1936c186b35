"""Hardware of a cluster: devices, the links between them, and host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.json_documents import check_range

MAX_DEVICES: Final = 64
DISK: Final = ("disk_write_bandwidth", "disk_read_bandwidth")
BANDWIDTHS: Final = (
    "memory_bandwidth", "host_bandwidth", "host_bandwidth_shared", "node_bandwidth", "network_bandwidth", *DISK,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster of equal nodes.

    Bandwidths are the specified bandwidths of one device in one direction, in bytes per second.

    Raises:
        ValueError: A number is out of range.
    """

    name: str
    device: str
    """Product name of the device."""

    peak_flops: float
    """Peak of dense bf16 matrix products in FLOP/s, to which MFU is relative."""

    device_bytes: int
    """Device memory that a process can use."""

    memory_bandwidth: float
    """Of device memory, reads and writes together."""

    devices_per_node: int
    host_bytes: int
    """Host memory per node."""

    host_bandwidth: float
    """Between a device and its host, if no other device copies."""

    host_bandwidth_shared: float
    """Between a device and its host, if all devices of the node copy at once."""

    node_bandwidth: float
    """Between the devices of a node."""

    network_bandwidth: float
    """Between nodes."""

    disk_write_bandwidth: float | None = None
    """Write bandwidth of a node's disk while it also reads, or None if unknown."""

    disk_read_bandwidth: float | None = None
    """Read bandwidth of a node's disk while it also writes, or None if unknown."""

    def __post_init__(self) -> None:
        check_range(self, {"devices_per_node": 1, "device_bytes": 1, "peak_flops": 1})
        for name in BANDWIDTHS:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value!r} must be more than 0")

    @property
    def device_counts(self) -> list[int]:
        """Possible numbers of devices: up to one node, or whole nodes."""
        node = self.devices_per_node
        return [count for count in range(1, MAX_DEVICES + 1) if count <= node or count % node == 0]

    def host_bandwidth_of(self, devices: int) -> float:
        """Bandwidth of each device if that many devices of a node copy at once."""
        return min(self.host_bandwidth, self.host_bandwidth_shared * self.devices_per_node / devices)
