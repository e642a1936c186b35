"""PyTorch's own caching CUDA allocator, on the stub runtime: what it does with the requests of a trace.

It runs in a process of its own, because an installed CPU build of torch has a library of the same name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_memo.artifacts.trace import Trace
from lightning_memo.utils import native_build as native

HERE = Path(__file__).parent
DEVICE_BYTES = 2**40
"""Of the stub device: what is allocated there takes addresses, and no memory."""

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_RUN = """
import ctypes, sys
import numpy as np

source, target, device_bytes, *libraries = sys.argv[1:]
for library in libraries:
    real = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
real.replay.restype = ctypes.c_int64
real.start(ctypes.c_int64(int(device_bytes)))
given, results = np.load(source), {}
for number in range(len(given) // 3):
    size, death, (steps, resident_bytes) = (given[f"{name}{number}"] for name in ("size", "death", "numbers"))
    shown = np.zeros((2, steps, len(size)), np.int64)
    columns = (ctypes.c_void_p(array.ctypes.data) for array in (size, death))
    rows = (ctypes.c_void_p(array.ctypes.data) for array in shown)
    counts = (ctypes.c_int64(int(value)) for value in (steps, len(size)))
    left = real.replay(*counts, *columns, ctypes.c_int64(int(resident_bytes)), *rows)
    if left:
        sys.exit(f"replay {number}: {left} bytes are left")
    results[str(number)] = shown
np.savez(target, **results)
"""


class Replay(NamedTuple):
    """What to replay.

    Attributes:
        trace: The step; only requests of lane 0 are served.
        steps: How often.
        resident_bytes: A buffer that is taken first, and stays.
    """

    trace: Trace
    steps: int
    resident_bytes: int = 0


class Curves(NamedTuple):
    """Bytes after each request of each step, [steps, requests]."""

    allocated: np.ndarray
    reserved: np.ndarray


def replay(
    replays: Sequence[Replay], version: Path, *, expandable: bool = False, device_bytes: int = DEVICE_BYTES
) -> list[Curves]:
    """Has the real allocator serve traces, each from an empty cache.

    Args:
        replays: What to serve.
        version: Folder of the fetched parts of a torch version, like `.cuda/2.13.0/torch`.
        expandable: Set `expandable_segments:True`.
        device_bytes: Memory of the stub device.

    Raises:
        BuildError: The libraries can't be built.
        RuntimeError: The replay failed; the message says why.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    environment[_SETTINGS[-1]] = f"expandable_segments:{expandable}"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "given.npz"), Path(folder, "results.npz")
        np.savez(source, **_arrays(replays))
        command = [sys.executable, "-c", _RUN, str(source), str(target), str(device_bytes)]
        command += map(str, _libraries(version))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        with np.load(target) as results:
            return [Curves(*results[str(number)]) for number in range(len(replays))]


def _arrays(replays: Sequence[Replay]) -> dict[str, np.ndarray]:
    arrays = {}
    for number, (trace, steps, resident_bytes) in enumerate(replays):
        arrays[f"size{number}"] = np.where(trace.lane == 0, trace.size, 0)
        arrays[f"death{number}"] = trace.death
        arrays[f"numbers{number}"] = np.array([steps, resident_bytes], np.int64)
    return arrays


def _libraries(version: Path) -> list[Path]:
    """In the order in which they are to be loaded."""
    flags = _flags(version)
    nvml = native.build("nvml_stub", [HERE / "nvml_stub.cpp"], [*_exported(), "-Wl,-soname,libnvidia-ml.so.1"])
    stub = build_stub(version)
    program = native.build("cuda_replay", [HERE / "replay.cpp"], [*_exported(), str(stub), *flags])
    return [nvml, stub, program]


def build_stub(version: Path) -> Path:
    """The stub runtime.

    Args:
        version: Folder of the fetched parts of a torch version.
    """
    includes = [f"-isystem{folder}" for folder in native.cuda_include_folders(version)]
    map_flag = f"-Wl,--version-script={HERE / 'cudart_stub.map'}"
    sources = [HERE / "cudart_stub.cpp", HERE / "driver_stub.cpp"]
    return native.build("cudart_stub", sources, [*includes, *_exported(), map_flag, "-Wl,-soname,libcudart.so.13"])


def _exported() -> list[str]:
    return ["-fvisibility=default", "-O0"]  # the last one takes half of the time


def _flags(version: Path) -> list[str]:
    includes = [version / "include", *native.cuda_include_folders(version)]
    libraries = version / "lib"
    return [
        *(f"-isystem{folder}" for folder in includes),
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
        "-lc10_cuda",
        "-lc10",
    ]
