"""Hardware of a cluster, and the calibrated fractions of its peaks that training reaches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_memo.artifacts.json_documents import check_range, read_json

MAX_DEVICES: Final = 64
DISK: Final = ("disk_write_bandwidth", "disk_read_bandwidth")
BANDWIDTHS: Final = (
    "memory_bandwidth", "host_bandwidth", "host_bandwidth_shared", "node_bandwidth", "network_bandwidth", *DISK,
)  # fmt: skip

VERSION: Final = 3
_FOLDER: Final = Path(__file__).parent / "calibrated"
_DEFAULT: Final = "default"
_NAMES: Final = {"h100": "hopper", "h200": "hopper", "gh200": "hopper"}
"""Constants by the name of a cluster. The others have the default constants."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Calibrated constants of a kind of machine and its software.

    Raises:
        ValueError: An efficiency is not between 0 and 1, or a number is negative.
    """

    source: str
    """Origin of the constants, as sentences for the user."""

    dense_efficiency: float
    """Fraction of the peak FLOP/s that matrix products reach."""

    attention_forward_efficiency: float
    """Fraction of the peak FLOP/s in the forward of causal attention, without masked pairs."""

    attention_backward_efficiency: float
    """Fraction of the peak FLOP/s in the backward of attention, which has 2.5 times the FLOPs of the forward."""

    memory_efficiency: float
    """Fraction of `Cluster.memory_bandwidth` that memory-bound operations reach."""

    host_efficiency: float
    """Fraction of `Cluster.host_bandwidth_of` that copies reach during computation."""

    merged_bytes_per_second: float
    """Rate at which ring attention merges partial attention outputs, one per step of the ring."""

    device_share: float
    """Fraction of device memory that is usable next to the CUDA context, communication buffers and libraries."""

    host_share: float
    """Fraction of host memory that is usable for copies."""

    fragmentation: float
    """Memory lost to fragmentation without planned memory, as a fraction of the activations."""

    cluster: str = ""
    """Cluster to whose peaks the efficiencies are relative; empty for any cluster."""

    note: str = ""
    """Short note beside times that these constants give; empty if they were measured on the machine."""

    measurements: tuple[str, ...] = ()
    """Measurements that the constants were fitted to, each with its residual, or the origin of each constant."""

    version: int = VERSION

    def __post_init__(self) -> None:
        check_range(self, {})
        for name in (
            "dense_efficiency", "attention_forward_efficiency", "attention_backward_efficiency",
            "memory_efficiency", "host_efficiency", "device_share", "host_share",
        ):  # fmt: skip
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0 and at most 1")


def read_constants(path: Path) -> Constants:
    """Read constants from a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file does not contain constants. The message names the field.
    """
    try:
        return read_json(Constants, path.read_text(encoding="utf-8"), VERSION)
    except ValueError as error:
        raise ValueError(f"{path}: not a file of constants: {error}; write it again with calibrate") from None


def constants_of(cluster: str) -> Constants:
    """Return the constants of a cluster by its name, or the default constants for other clusters."""
    return read_constants(_FOLDER / f"{_NAMES.get(cluster, _DEFAULT)}.json")
