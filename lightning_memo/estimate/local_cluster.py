"""The cluster of this machine, `cluster=auto`. Reading its GPUs imports torch, which no other estimate does."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lightning_memo.estimate.cluster import AUTO, Cluster, load_cluster, preset_names

_ASK: Final = f"cluster={AUTO}"


def local_cluster() -> Cluster:
    """Return the preset of this machine's GPUs, with their number and memory, and the host memory that is free.

    Raises:
        ValueError: There is no GPU, GPUs differ, or no preset has their name. The message lists the presets.
    """
    presets = {name: load_cluster(name) for name in preset_names("cluster")}
    names, device_bytes = _devices(presets)
    found = [cluster for cluster in presets.values() if cluster.device == names[0]]
    if not found:
        near = difflib.get_close_matches(names[0], [cluster.device for cluster in presets.values()], n=2)
        similar = " or ".join(
            f"{name} ({cluster.device})" for name, cluster in presets.items() if cluster.device in near
        )
        raise ValueError(
            f"{_ASK}: no preset is for {names[0]}: give the cluster that is nearest, and change its values with "
            f"cluster.NAME=VALUE: {similar or ', '.join(presets)}"
        )
    from lightning_memo.utils.free_memory import available_host_bytes

    return replace(
        found[0],
        device_bytes=device_bytes,
        devices_per_node=len(names),
        host_bytes=available_host_bytes(),
        host_bandwidth_shared=found[0].host_bandwidth_of(len(names)),
    )


def _devices(presets: Mapping[str, Cluster]) -> tuple[list[str], int]:
    """Names of this machine's GPUs, which are all the same, and the memory of one."""
    missing = f"give the cluster to estimate: {', '.join(presets)}"
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"{_ASK}: torch, which reads the GPUs, is not installed: {missing}")
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"{_ASK}: torch finds no GPU on this machine: {missing}")
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [device.name for device in devices]
    if len(set(names)) > 1:
        raise ValueError(
            f"{_ASK}: this machine has {' and '.join(sorted(set(names)))}: choose those of one kind with "
            "CUDA_VISIBLE_DEVICES"
        )
    return names, min(device.total_memory for device in devices)
