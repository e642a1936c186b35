"""Runs a training program at full size on a simulated GPU: does it fit, and how long does a step take?

    python benchmarks/rehearse.py --host-memory 128GiB train.py ARGUMENTS...
    python benchmarks/rehearse.py benchmarks/gpu.py --models llama3_8b --tuning lora --lengths 64K

The program, PyTorch and its allocators are real and unmodified. Operations on large tensors are not computed: they take
the time that a model of the device says. So memory is that of a GPU, times are simulated, and losses have no meaning.
It needs the environment of `make test-cuda`: run it with .cuda/venv/bin/python. benchmarks/rehearsal/ describes the
devices.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_memo.utils.units import parse_bytes

DEVICES = Path(__file__).parent / "rehearsal"


def main() -> None:
    options = _options()
    environment = {**os.environ, **simulated(options.device, options.host_memory, dict(options.set))}
    command = [sys.executable, options.program, *options.arguments]
    os.execve(sys.executable, command, environment)


def simulated(device: str, host_bytes: int, changes: dict[str, float]) -> dict[str, str]:
    """Return the environment variables of a process on a simulated device.

    Args:
        device: A file in benchmarks/rehearsal, without its suffix.
        host_bytes: Memory of the host.
        changes: Numbers that replace those of the file.
    """
    described: Any = OmegaConf.to_container(OmegaConf.load(DEVICES / f"{device}.yaml"))
    numbers = {name: float(value) for name, value in described["numbers"].items()}
    return {
        "EMULATED_CUDA_SIMULATE": "1",
        "EMULATED_CUDA_NAME": described["name"],
        "EMULATED_CUDA_MEMORY_MIB": str(parse_bytes(described["device_bytes"]) >> 20),
        "EMULATED_CUDA_MACHINE": json.dumps({**numbers, **changes, "host_bytes": host_bytes}),
        "OMP_NUM_THREADS": "1",
    }


def _change(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in DEVICES.glob("*.yaml"))
    parser.add_argument("--device", choices=names, default="h200")
    parser.add_argument("--host-memory", type=parse_bytes, default=parse_bytes("128GiB"), help="default: 128GiB")
    parser.add_argument("--set", type=_change, action="append", default=[], metavar="NAME=VALUE",
                        help="a number of the device, for example cudnn_forward=681e12")  # fmt: skip
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args()


if __name__ == "__main__":
    main()
