"""Hardware of a cluster, with the fractions of its peaks that training reaches, and presets of clusters and models."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from lightning_memo.artifacts.json_documents import check_range, read_json
from lightning_memo.cli.hydra_command import config_dir, plain_settings
from lightning_memo.shapes.hf_config import CONFIG_FILES, hub_folder, load_shape, shape_of
from lightning_memo.shapes.model_shape import ModelShape, adapters_of
from lightning_memo.utils.units import parse_bytes

MAX_DEVICES: Final = 64
AUTO: Final = "auto"
"""Name of the cluster that is this machine."""
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
    """Name of the device, as CUDA reports it."""

    peak_flops: float
    """Peak of dense matrix products in FLOP/s, to which MFU is relative: in bf16 with fp32 accumulation, or in fp32 if
    `bf16` is False."""

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

    bf16: bool = True
    """Whether the device has units for matrix products in bf16."""

    note: str = ""
    """Sentence for users of the cluster, which estimates repeat."""

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


_SIZES: Final = ("device_bytes", "host_bytes")
_TEXTS: Final = ("name", "device", "note")
_COUNT: Final = "devices_per_node"
_BF16: Final = "bf16"
_OPTIONAL: Final = (*DISK, _BF16, "note")


def preset_names(group: str) -> list[str]:
    """Return the names of the presets in a group of `conf`."""
    files = (Path(config_dir()) / group).glob("*.yaml")
    return sorted(file.stem for file in files if file.stem not in ("default", AUTO))


def load_preset(group: str, name: str) -> dict[str, Any]:
    """Return the settings of a preset.

    Raises:
        ValueError: The preset does not exist. The message lists all presets.
    """
    names = preset_names(group)
    if name not in names:
        raise ValueError(f"{group}={name!r} does not exist: give {', '.join(names)}")
    settings = OmegaConf.load(Path(config_dir()) / group / f"{name}.yaml")
    assert isinstance(settings, DictConfig)
    return plain_settings(settings)


def load_cluster(name: str) -> Cluster:
    """Return the cluster of a preset in `conf/cluster`, or this machine for "auto".

    Raises:
        ValueError: The preset does not exist, or this machine's GPUs have none. The message lists the presets.
    """
    return cluster_of({"name": AUTO} if name == AUTO else load_preset("cluster", name))


def load_model(name: str) -> ModelShape:
    """Return the model shape of a preset in `conf/model`.

    Raises:
        ValueError: The preset does not exist. The message lists all presets.
    """
    return model_of(load_preset("model", name), name)


def cluster_of(settings: Mapping[str, Any]) -> Cluster:
    """Build a cluster from settings, with sizes such as "80GiB" and bandwidths per second such as "25GB".

    With the name "auto", settings that are missing are those of this machine.

    Raises:
        ValueError: A setting is missing, unknown or not allowed, or this machine's GPUs have no preset.
    """
    names = [field.name for field in fields(Cluster)]
    for name in settings:
        if name not in names:
            raise ValueError(f"cluster.{str(name)[:40]} is not a setting: give {', '.join(names)}")
    local = settings.get("name") == AUTO
    given = {
        name: settings[name] for name in names if settings.get(name) is not None and not (local and name == "name")
    }
    for name in names:
        if name not in given and name not in _OPTIONAL and not local:
            raise ValueError(f"cluster.{name} is missing: give a value, or choose a preset with cluster=")
    try:
        values = {name: _cluster_value(name, value) for name, value in given.items()}
    except ValueError as error:
        raise ValueError(f"cluster: {error}") from None
    here = _local_cluster() if local else None
    try:
        return Cluster(**values) if here is None else replace(here, **values)
    except ValueError as error:
        raise ValueError(f"cluster: {error}") from None


def _local_cluster() -> Cluster:
    """The preset of this machine's GPUs, with their number and memory, and the host memory that is free."""
    presets = {name: load_cluster(name) for name in preset_names("cluster")}
    missing = f"give the cluster to estimate: {', '.join(presets)}"
    try:
        from lightning_memo.utils.free_memory import available_host_bytes, local_gpus
    except ModuleNotFoundError as error:  # all other estimates do without torch
        raise ValueError(f"cluster=auto: {error.name}, which reads the GPUs, is not installed: {missing}") from None
    gpus, device_bytes = local_gpus()
    if not gpus:
        raise ValueError(f"cluster=auto: torch finds no GPU on this machine: {missing}")
    if len(set(gpus)) > 1:
        raise ValueError(
            f"cluster=auto: this machine has {' and '.join(sorted(set(gpus)))}: choose those of one kind with "
            "CUDA_VISIBLE_DEVICES"
        )
    for cluster in presets.values():
        if cluster.device == gpus[0]:
            return replace(
                cluster,
                device_bytes=device_bytes,
                devices_per_node=len(gpus),
                host_bytes=available_host_bytes(),
                host_bandwidth_shared=cluster.host_bandwidth_of(len(gpus)),
            )
    near = difflib.get_close_matches(gpus[0], [cluster.device for cluster in presets.values()], n=2)
    similar = " or ".join(f"{name} ({cluster.device})" for name, cluster in presets.items() if cluster.device in near)
    raise ValueError(
        f"cluster=auto: no preset is for {gpus[0]}: give the cluster that is nearest, and change its values with "
        f"cluster.NAME=VALUE: {similar or ', '.join(presets)}"
    )


def model_of(settings: Mapping[str, Any], name: str) -> ModelShape:
    """Build the shape of a model from the settings of the group `model`: from `path`, or otherwise from `config`.

    Args:
        settings: Settings of the group.
        name: Name for a model without a path.

    Raises:
        ValueError: Neither is given, the shape is incomplete, or adapters (`lora`) are not supported for it.
    """
    shape = _shape_of(settings, name)
    adapters = adapters_of(settings.get("lora") or {})
    try:
        return replace(shape, adapters=adapters)
    except ValueError as error:
        raise ValueError(f"model: {error}") from None


def _shape_of(settings: Mapping[str, Any], name: str) -> ModelShape:
    if settings.get("path") is not None:
        path = str(settings["path"])
        folder = hub_folder(path, CONFIG_FILES, "model.path")
        shape = load_shape(folder)
        return shape if folder == Path(path) else replace(shape, name=path)  # a snapshot's folder is named by a hash
    config = settings.get("config")
    if not isinstance(config, Mapping):
        raise ValueError(
            "model: give a preset, model.path (a folder, a config.json or an id on the Hub) or model.config"
        )
    try:
        return shape_of(config, name)
    except ValueError as error:
        raise ValueError(f"model.config: {error}") from None


def _cluster_value(name: str, value: Any) -> Any:
    if name in _TEXTS:
        return str(value)
    if name in _SIZES:
        return parse_bytes(value)
    if name in BANDWIDTHS and isinstance(value, str):
        return float(parse_bytes(value))
    if name == _BF16:
        if not isinstance(value, bool):
            raise ValueError(f"bf16={value!r}: give true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} is not a number")
    if name == _COUNT and value != int(value):
        raise ValueError(f"{name}={value!r} is not a whole number")
    return value
