"""Simulated time of the emulated device: what a step takes on a GPU that is not there.

It begins with `import torch` if `EMULATED_CUDA_SIMULATE` is 1. `EMULATED_CUDA_MACHINE` describes the machine: JSON with
the numbers of `Machine` in `csrc/device/simulation.h` by name, among them `host_bytes`, the memory of the host, and
`ranks`: this process is then one of as many on this host, of which no other is there, and which all do the same.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import emulated_device
import numpy as np
import numpy.typing as npt

COMPUTE = (
    "gemm_half", "gemm_tf32", "gemm_fp32", "gemm_fp64", "gemm_fp8", "flash_forward", "flash_backward", "cudnn_forward",
    "cudnn_backward", "efficient_forward", "efficient_backward",
)  # fmt: skip
KINDS = (*COMPUTE, "memory", "to_device", "to_host", "pageable", "network", "pause", "wait")

_MAP_NORESERVE = 0x4000  # of Linux; the module has it since Python 3.13

SPAN = np.dtype(
    [
        ("stream", "i4"),  # -1: a wait of the host
        ("kind", "i4"),  # an index of `KINDS`
        ("waited_for", "i4"),  # the stream for which the operation began late, or -1
        ("thread", "i4"),
        ("launched", "f8"),
        ("start", "f8"),
        ("end", "f8"),
        ("flops", "f8"),
        ("bytes", "f8"),
        ("name", "u8"),
    ]
)


def start() -> None:
    """Make this process see the machine that is simulated: its clock, and its memory.

    Operations on large tensors are not computed, so memory of the host that only they use is never touched.
    """
    machine = json.loads(os.environ.get("EMULATED_CUDA_MACHINE", "{}"))
    set_machine(machine)
    mmap.MAP_ANONYMOUS |= _MAP_NORESERVE  # type: ignore[misc]
    mmap.MADV_POPULATE_WRITE = mmap.MADV_NORMAL  # type: ignore[attr-defined]
    mmap.MADV_HUGEPAGE = mmap.MADV_NOHUGEPAGE  # type: ignore[misc]  # a small copy would touch 2 MiB
    time.perf_counter = now
    time.perf_counter_ns = lambda: int(now() * 1e9)
    _follow_threads()
    ranks = int(machine.get("ranks", 1))
    if "host_bytes" in machine:
        _show_host_memory(int(machine["host_bytes"]), ranks)
    if ranks > 1:
        _be_one_rank()


def _follow_threads() -> None:
    """Make a wait for a thread take until the time of that thread, whose clock is its own."""
    result, set_result, join = Future.result, Future.set_result, Thread.join
    runtime, lock = emulated_device.runtime(), Lock()

    def end_wait(future: Future[Any]) -> None:
        with lock:
            if future.__dict__.pop("awaited", False):
                runtime.emulated_cuda_end_wait()

    def result_in_time(future: Future[Any], timeout: float | None = None) -> Any:
        with lock:
            future.awaited = not future.done() and runtime.emulated_cuda_begin_wait()  # type: ignore[attr-defined]
        try:
            value = result(future, timeout)
        finally:
            end_wait(future)
        runtime.emulated_cuda_wait_until(ctypes.c_double(future.ended))  # type: ignore[attr-defined]
        return value

    def set_result_in_time(future: Future[Any], value: Any) -> None:
        future.ended = now()  # type: ignore[attr-defined]
        end_wait(future)  # here, because this thread would run ahead until the other one goes on
        set_result(future, value)

    def join_in_time(thread: Thread, timeout: float | None = None) -> None:
        counted = runtime.emulated_cuda_begin_wait()
        try:
            join(thread, timeout)
        finally:
            if counted:
                runtime.emulated_cuda_end_wait()

    Future.result = result_in_time  # type: ignore[method-assign]
    Future.set_result = set_result_in_time  # type: ignore[method-assign]
    Thread.join = join_in_time  # type: ignore[method-assign]


def _be_one_rank() -> None:
    """Let process groups form without the other ranks. NCCL's communicators do so in `csrc/nccl`."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def store(*args: Any, **settings: Any) -> dist.Store:
        return dist.HashStore()

    import_module("torch.distributed.rendezvous").TCPStore = store  # type: ignore[attr-defined]
    initialize = distributed_c10d.init_process_group

    def initialize_alone(backend: str | None = None, *args: Any, **settings: Any) -> None:
        # With a device, groups are made by splitting communicators, whose members only the other ranks' answers tell.
        # Collectives of the host's tensors, for which gloo would wait for the other ranks, are errors.
        initialize("cuda:nccl" if "nccl" in (backend or "") else backend, *args, **{**settings, "device_id": None})

    dist.init_process_group = distributed_c10d.init_process_group = initialize_alone


def _show_host_memory(size_bytes: int, ranks: int) -> None:
    """Make /proc/meminfo, as `pathlib` reads it, that of a host of this size, less what the ranks have locked."""
    read_text = Path.read_text

    def read(path: Path, *arguments: Any, **settings: Any) -> str:
        if path != Path("/proc/meminfo"):
            return read_text(path, *arguments, **settings)
        left = size_bytes - ranks * emulated_device.count("pinned_bytes")
        return f"MemTotal: {size_bytes >> 10} kB\nMemAvailable: {left >> 10} kB\n"

    Path.read_text = read  # type: ignore[method-assign]


def set_machine(numbers: Mapping[str, float]) -> None:
    """Set rates (per second), latencies and overheads (seconds) by their names in `csrc/device/simulation.h`.

    Raises:
        ValueError: A name is unknown.
    """
    for name, value in numbers.items():
        if emulated_device.runtime().emulated_cuda_set_machine(name.encode(), ctypes.c_double(value)) != 0:
            raise ValueError(f"simulated time has no number {name!r}")


def now() -> float:
    """Return the time of the host, in seconds since the start of the program."""
    function = emulated_device.runtime().emulated_cuda_now
    function.restype = ctypes.c_double
    return float(function())


def take_spans() -> npt.NDArray[Any]:
    """Return the operations and waits since the last call, in the order in which they were launched."""
    take = emulated_device.runtime().emulated_cuda_take_spans
    take.restype = ctypes.c_size_t
    spans = np.empty(take(None, ctypes.c_size_t(0)), SPAN)
    taken = take(ctypes.c_void_p(spans.ctypes.data), ctypes.c_size_t(len(spans)))
    return spans[:taken]


def names_of(spans: npt.NDArray[Any]) -> list[str]:
    """Return the name of each operation."""
    known = {int(address): ctypes.string_at(int(address)).decode() for address in np.unique(spans["name"])}
    return [known[int(address)] for address in spans["name"]]
