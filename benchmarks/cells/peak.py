"""The peak FLOP/s of a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from lightning_memo.estimate.cluster import load_cluster, preset_names

_SIZE = 8192
_PRODUCTS = 20


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense bf16 FLOP/s.

    Attributes:
        source: Origin of the number.
    """

    flops: float
    source: str


def peak_of(device: torch.device) -> Peak | None:
    """Returns the manufacturer's value for a GPU, or else the speed of a large matrix product; `None` on a CPU."""
    if device.type != "cuda":
        return None
    return specified(torch.cuda.get_device_name(device)) or _measured(device)


def specified(name: str) -> Peak | None:
    """Returns the peak from the file in `conf/cluster` for the device of a name, or `None`.

    A simulated device is "NVIDIA H100 (simulated)" for the file h100.yaml.
    """
    model, simulated, _ = name.removeprefix("NVIDIA ").partition(" (simulated)")
    for cluster in map(load_cluster, preset_names("cluster")):
        if cluster.name == model.lower() if simulated else cluster.device == name:
            return Peak(cluster.peak_flops, f"conf/cluster/{cluster.name}.yaml")
    return None


def _measured(device: torch.device) -> Peak:
    a, b = (torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = a @ b
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(_PRODUCTS):
        torch.matmul(a, b, out=out)
    torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - start) / _PRODUCTS
    return Peak(2.0 * _SIZE**3 / seconds, f"measured: products of {_SIZE} x {_SIZE} matrices")
