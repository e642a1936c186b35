"""The machines: devices, their links, and the memory of their hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.json_documents import check_range

MOST_DEVICES: Final = 64
DISK: Final = ("disk_write_bandwidth", "disk_read_bandwidth")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes that are alike. Bandwidths are those of one device in one direction, in bytes per second, as specified.

    Raises:
        ValueError: a number below 1.
    """

    name: str
    device: str
    """What the device is called by its maker."""

    peak_flops: float
    """Of dense bf16 matrix products, per second; what MFU is a share of."""

    device_bytes: int
    """Memory of a device that a process can use."""

    devices_per_node: int
    host_bytes: int
    """Memory of a node."""

    host_bandwidth: float
    """Between a device and its host, when it alone copies."""

    host_bandwidth_shared: float
    """The same when all devices of a node copy at once."""

    node_bandwidth: float
    """Between the devices of a node."""

    network_bandwidth: float
    """Between nodes."""

    disk_write_bandwidth: float | None = None
    """Of a node's disk, when it writes and reads at once; None: not known."""

    disk_read_bandwidth: float | None = None

    def __post_init__(self) -> None:
        check_range(self, {"devices_per_node": 1, "device_bytes": 1, "peak_flops": 1})
        for name in ("host_bandwidth", "host_bandwidth_shared", "node_bandwidth", "network_bandwidth", *DISK):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value!r} must be more than 0")

    @property
    def device_counts(self) -> list[int]:
        """How many devices can be asked for: some of a node, or whole nodes."""
        node = self.devices_per_node
        return [count for count in range(1, MOST_DEVICES + 1) if count <= node or count % node == 0]

    def host_bandwidth_of(self, devices: int) -> float:
        """What each of some devices of a node gets when all of these copy: its link's, or its part of the host's."""
        return min(self.host_bandwidth, self.host_bandwidth_shared * self.devices_per_node / devices)
