"""Runs a training program at full size on a simulated GPU: does it fit, and how long does a step take?

    .cuda/venv/bin/python benchmarks/rehearse.py --host-memory 128GiB train.py ARGUMENTS...
    .cuda/venv/bin/python benchmarks/rehearse.py benchmarks/gpu.py --models llama3_8b --lengths 64K --output FOLDER
    .cuda/venv/bin/python benchmarks/rehearse.py --device h100 --ranks 8 --network nvlink train.py ARGUMENTS...

The program, PyTorch and its allocators are real and unmodified. Operations on large tensors are not computed: they take
the time that a model of the device says. So memory is that of a GPU, times are simulated, and losses have no meaning.

With `--ranks`, the program is the first of so many processes, as if torchrun had started them on a host. The others are
not there, and are taken to do the same: collectives take the time of the network, and return what this rank gives. All
share the memory of the host and its bandwidth.

`make test-cuda` installs what it needs. benchmarks/rehearsal/ describes the devices; docs/benchmarks.md says what is
not simulated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_memo.estimate.cluster import load_cluster
from lightning_memo.utils.units import parse_bytes

DEVICES = Path(__file__).parent / "rehearsal"


def main() -> None:
    options = _options()
    if importlib.util.find_spec("simulated_time") is None:
        print(
            f"{sys.executable} has no emulated GPU: run `make test-cuda` once, and use .cuda/venv/bin/python",
            file=sys.stderr,
        )
        sys.exit(2)
    numbers = dict(options.set)
    if options.ranks > 1:
        numbers = {**_shared(options.device, options.network, options.ranks), **numbers}
    environment = {**os.environ, **simulated(options.device, options.host_memory, numbers), **_one_of(options.ranks)}
    command = [sys.executable, options.program, *options.arguments]
    os.execve(sys.executable, command, environment)


def simulated(device: str, host_bytes: int, changes: dict[str, float]) -> dict[str, str]:
    """Return the environment variables of a process on a simulated device.

    Args:
        device: A file in benchmarks/rehearsal, without its suffix.
        host_bytes: Memory of the host.
        changes: Numbers that replace those of the file.
    """
    content = described(device)
    numbers = {name: float(value) for name, value in content["numbers"].items()}
    return {
        "EMULATED_CUDA_SIMULATE": "1",
        "EMULATED_CUDA_NAME": content["name"],
        "EMULATED_CUDA_MEMORY_MIB": str(parse_bytes(content["device_bytes"]) >> 20),
        "EMULATED_CUDA_MACHINE": json.dumps({**numbers, **changes, "host_bytes": host_bytes}),
        "OMP_NUM_THREADS": "1",
    }


def _shared(device: str, network: str, ranks: int) -> dict[str, float]:
    """Return the numbers of a device among several of a host: of its links, and its share of the host's bandwidth."""
    content, cluster = described(device), load_cluster(device)
    share = cluster.host_bandwidth_of(ranks) / cluster.host_bandwidth_of(1)
    copies = {name: share * float(content["numbers"][name]) for name in ("to_device", "to_host")}
    links = {name: float(value) for name, value in content["networks"][network].items()}
    return {**links, **copies, "ranks": ranks}


def _one_of(ranks: int) -> dict[str, str]:
    """Return the environment variables by which torchrun tells the first of several processes on a host who it is."""
    if ranks == 1:
        return {}
    named = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "rehearsal"}
    return {**{name: str(value) for name, value in named.items()}, **address, "EMULATED_CUDA_DEVICES": str(ranks)}


def described(device: str) -> Any:
    """Return the content of a file in benchmarks/rehearsal."""
    return OmegaConf.to_container(OmegaConf.load(DEVICES / f"{device}.yaml"))


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _change(text: str) -> tuple[str, float]:
    name, _, given = text.partition("=")
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE with a positive number, like hbm=4e12")
    return name, value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in DEVICES.glob("*.yaml"))
    parser.add_argument("--device", choices=names, default="h200")
    parser.add_argument("--host-memory", type=_size, default=parse_bytes("128GiB"),
                        help="memory of the host that can be locked (default: 128GiB)")  # fmt: skip
    parser.add_argument("--set", type=_change, action="append", default=[], metavar="NAME=VALUE",
                        help="a number of the device, for example cudnn_forward=681e12")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="processes, of which the first one runs (default: 1)")
    parser.add_argument("--network", choices=("nvlink",), default="nvlink", help="links between the ranks")
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    options = parser.parse_args()
    most = load_cluster(options.device).devices_per_node
    if not 1 <= options.ranks <= most:
        parser.error(f"argument --ranks: {options.ranks}: give 1 to {most}, the devices that {options.network} links")
    known = [*described(options.device)["numbers"], "host_scale", "queue_length"]
    if options.ranks > 1:
        known += described(options.device)["networks"][options.network]
    for name, _ in options.set:
        if name not in known:
            parser.error(f"argument --set: {options.device} has no number {name!r}: give one of {', '.join(known)}")
    return options


if __name__ == "__main__":
    main()
