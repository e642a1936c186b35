"""Runs a training program at full size on a simulated GPU: does it fit, and how long does a step take?

    .cuda/venv/bin/python benchmarks/rehearse.py --host-memory 128GiB train.py ARGUMENTS...
    .cuda/venv/bin/python benchmarks/rehearse.py benchmarks/gpu.py --models llama3_8b --lengths 64K --output FOLDER

The program, PyTorch and its allocators are real and unmodified. Operations on large tensors are not computed: they take
the time that a model of the device says. So memory is that of a GPU, times are simulated, and losses have no meaning.
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
    content = described(device)
    numbers = {name: float(value) for name, value in content["numbers"].items()}
    return {
        "EMULATED_CUDA_SIMULATE": "1",
        "EMULATED_CUDA_NAME": content["name"],
        "EMULATED_CUDA_MEMORY_MIB": str(parse_bytes(content["device_bytes"]) >> 20),
        "EMULATED_CUDA_MACHINE": json.dumps({**numbers, **changes, "host_bytes": host_bytes}),
        "OMP_NUM_THREADS": "1",
    }


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
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    options = parser.parse_args()
    known = [*described(options.device)["numbers"], "host_scale", "queue_length"]
    for name, _ in options.set:
        if name not in known:
            parser.error(f"argument --set: {options.device} has no number {name!r}: give one of {', '.join(known)}")
    return options


if __name__ == "__main__":
    main()
