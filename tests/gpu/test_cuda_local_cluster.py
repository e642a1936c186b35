"""`cluster=auto`: the preset that has the name of this machine's GPUs, with their number and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest
import torch

from lightning_memo.estimate import load_cluster
from lightning_memo.estimate.cluster import cluster_of

_EMULATED: Final = "EMULATED_CUDA_NAME"


def run(name: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process whose GPUs have a name."""
    environment = {**os.environ, _EMULATED: name}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _named() -> None:
    if "(emulated)" not in torch.cuda.get_device_name():
        pytest.skip("only emulated GPUs have any name")


def test_a_preset_gets_the_number_and_the_memory_of_the_gpus() -> None:
    program = (
        "from lightning_memo.estimate.cluster import cluster_of;"
        "c = cluster_of({'name': 'auto', 'node_bandwidth': '7GB'});"
        "print(c.name, c.devices_per_node, c.device_bytes, c.peak_flops, c.node_bandwidth, c.host_bandwidth_shared)"
    )
    devices, preset = torch.cuda.device_count(), load_cluster("rtx_4090")
    size = torch.cuda.get_device_properties(0).total_memory
    shared = preset.host_bandwidth_of(devices)
    told = run(preset.device, program)
    assert told.stdout.split() == [
        preset.name,
        str(devices),
        str(size),
        "165200000000000.0",
        "7000000000.0",
        str(shared),
    ], told


def test_a_command_estimates_all_gpus() -> None:
    told = run("NVIDIA L40S", "from lightning_memo.estimate.command import main; import sys; "
               "sys.argv[1:] = ['cluster=auto', 'model=llama_tiny', 'seq_len=4K']; main()")  # fmt: skip
    assert f"{torch.cuda.device_count()} x NVIDIA L40S, 1 node" in told.stdout, told.stderr


def test_other_gpus_are_told_with_the_nearest_presets() -> None:
    with pytest.raises(ValueError, match=r"no preset is for NVIDIA H200 \(emulated\): .* h200 \(NVIDIA H200\)$"):
        cluster_of({"name": "auto"})
